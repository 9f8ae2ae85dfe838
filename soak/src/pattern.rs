//! Bytes that say whose they are: each word is made of a stamp and of its place, so no two stamps agree in any word.

use moonring::Registered;

fn word(stamp: u64, index: usize) -> [u8; 8] {
    let place = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (stamp ^ place).wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(29).to_le_bytes()
}

/// The pattern's bytes from place `at` on, in the pieces that `len` bytes have of its words.
fn pieces(stamp: u64, at: usize, len: usize) -> impl Iterator<Item = (usize, [u8; 8], std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let place = at + done;
        let range = place % 8..(place % 8 + len - done).min(8);
        let piece = (done, word(stamp, place / 8), range.clone());
        done += range.len();
        (!range.is_empty()).then_some(piece)
    })
}

/// Writes `len` bytes of the pattern, from its place `at` on, to `offset`.
pub fn fill(region: &Registered, offset: usize, len: usize, stamp: u64, at: usize) {
    let mut bytes = vec![0; len];
    for (done, word, range) in pieces(stamp, at, len) {
        bytes[done..done + range.len()].copy_from_slice(&word[range]);
    }
    region.write_at(offset, &bytes).expect("the range is inside the region, which stays registered");
}

/// Where the first byte at `offset` differs from the pattern, of which `at` is the first place there.
pub fn first_wrong(region: &Registered, offset: usize, len: usize, stamp: u64, at: usize) -> Option<usize> {
    let mut bytes = vec![0; len];
    region.read_at(offset, &mut bytes).expect("the range is inside the region, which stays registered");
    let is_wrong = |(done, word, range): &(usize, [u8; 8], std::ops::Range<usize>)| {
        bytes[*done..*done + range.len()] != word[range.clone()]
    };
    pieces(stamp, at, len).find(is_wrong).map(|(done, ..)| done)
}

#[cfg(test)]
mod tests {
    use moonring::{Engine, Region};

    use super::*;

    #[test]
    fn a_pattern_is_found_at_any_place_and_no_other_is() {
        let region = Engine::loopback().register(Region::alloc(4096).unwrap()).unwrap();
        for (offset, len, at) in [(0, 4096, 0), (3, 1, 7), (5, 100, 13), (8, 64, 8), (1, 0, 0)] {
            fill(&region, offset, len, 7, at);
            assert_eq!(first_wrong(&region, offset, len, 7, at), None);
            // Part of it, from inside.
            if len > 20 {
                assert_eq!(first_wrong(&region, offset + 9, len - 9, 7, at + 9), None);
                region.write_at(offset + 18, &[!word(7, (at + 18) / 8)[(at + 18) % 8]]).unwrap();
                let wrong = first_wrong(&region, offset, len, 7, at).unwrap();
                assert!((11..=18).contains(&wrong), "{wrong}");
            }
            assert_eq!(first_wrong(&region, offset, len, 8, at), (len > 0).then_some(0));
        }
    }
}
