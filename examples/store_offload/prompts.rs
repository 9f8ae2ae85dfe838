//! What the requests ask: prompts that begin with one of some documents and go on with a question of their own.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::args::Args;

/// Tokens of a block.
const TOKENS: usize = 16;

/// The prefix hashes of a prompt's blocks: of the block's tokens and all before. The keys and values of a block depend on
/// exactly that, so it names them, in the Store and in [`pages`](crate::common::pages).
///
/// Each prompt comes twice, in the first half of the requests and in the second.
pub fn prefix_hashes(args: &Args, request: usize) -> Vec<u64> {
    let prompt = request % (args.requests as usize).div_ceil(2);
    let document = prompt % args.documents;
    let mut hash = 0;
    (0..args.blocks())
        .map(|block| {
            let text = if block < args.document_blocks { document } else { args.documents + prompt };
            let mut hasher = DefaultHasher::new();
            hash.hash(&mut hasher);
            for token in 0..TOKENS {
                ((text * args.blocks() + block) * TOKENS + token).hash(&mut hasher);
            }
            hash = hasher.finish();
            hash
        })
        .collect()
}

/// How many different blocks all the prompts have.
pub fn distinct_blocks(args: &Args) -> usize {
    let prompts = (args.requests as usize).div_ceil(2);
    prompts.min(args.documents) * args.document_blocks + prompts * args.question_blocks
}
