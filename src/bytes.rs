//! Copying to and from memory that others may write at the same moment.
//!
//! A peer may write a registered range at any time, so no Rust reference may be held into one. Bytes are copied with
//! relaxed atomic accesses, eight at a time where alignment allows: racing with another such copy gives old or new
//! bytes, never undefined behaviour.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

/// Copies `len` bytes from `from` to `to`. The ranges do not overlap.
///
/// # Safety
/// Both ranges are mapped, `from` readable and `to` writable, for the whole call, and no Rust reference to either is
/// used meanwhile, unless the other side of a private buffer is the caller's own.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    let mut done = 0;
    if (from.addr() ^ to.addr()) & 7 == 0 {
        let head = from.addr().wrapping_neg() & 7;
        while done < head.min(len) {
            // SAFETY: `done < len`, and the caller vouches for both ranges.
            unsafe { byte(from.add(done), to.add(done)) };
            done += 1;
        }
        while done + 64 <= len {
            for at in 0..8 {
                // SAFETY: in range as above; both pointers are 8-aligned from `head` on.
                unsafe { word(from.add(done + 8 * at), to.add(done + 8 * at)) };
            }
            done += 64;
        }
        while done + 8 <= len {
            // SAFETY: as above.
            unsafe { word(from.add(done), to.add(done)) };
            done += 8;
        }
    }
    while done < len {
        // SAFETY: `done < len`, and the caller vouches for both ranges.
        unsafe { byte(from.add(done), to.add(done)) };
        done += 1;
    }
}

/// # Safety
/// Both are 8-aligned, `from` is readable and `to` writable.
#[inline]
unsafe fn word(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's; an AtomicU64 has u64's layout.
    unsafe { (*to.cast::<AtomicU64>()).store((*from.cast::<AtomicU64>()).load(Relaxed), Relaxed) };
}

/// # Safety
/// `from` is readable and `to` writable.
unsafe fn byte(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's; an AtomicU8 has u8's layout.
    unsafe { (*to.cast::<AtomicU8>()).store((*from.cast::<AtomicU8>()).load(Relaxed), Relaxed) };
}

#[cfg(test)]
mod tests {
    use super::copy;

    #[test]
    fn copies_exactly_the_range_at_every_alignment() {
        let source: Vec<u8> = (0..160).map(|n| n + 1).collect();
        for from in 0..9 {
            for to in 0..9 {
                for len in 0..150 {
                    let mut target = vec![0; 160];
                    // SAFETY: both ranges lie in their vectors: at most 8 + 149 of 160 bytes.
                    unsafe { copy(source.as_ptr().add(from), target.as_mut_ptr().add(to), len) };
                    assert_eq!(target[to..to + len], source[from..from + len]);
                    assert!(target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 0));
                }
            }
        }
    }
}
