//! What is in the pages: bytes that can be made again at any time, to fill a page and to check one.

/// Fills a page with the content called `id`.
pub fn fill(id: u64, page: &mut [u8]) {
    for (word, bytes) in (0..).zip(page.as_chunks_mut().0) {
        *bytes = expected(id, word);
    }
}

/// True if the page holds the content called `id`, in every byte.
pub fn matches(id: u64, page: &[u8]) -> bool {
    (0..).zip(page.as_chunks().0).all(|(word, bytes)| *bytes == expected(id, word))
}

/// One word of a page. It depends on the content and on the place, so a page that is old, foreign, shifted or torn
/// differs from the one that should be there.
fn expected(id: u64, word: u64) -> [u8; 8] {
    // SplitMix64 with `id` as its seed, without the multiplications for each word.
    let start = (id ^ (id >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let start = (start ^ (start >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (start ^ (start >> 31)).wrapping_add(word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()
}
