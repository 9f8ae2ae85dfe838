//! Where neighbours lie: on strips of local and remote memory, each behind the last one.

use std::ops::Range;

use super::book::{REGION, STRIPS_AT};
use super::program::{Gap, Plan, PlanOp, STRIPS, Strip};
use super::record::Place;
use crate::Segment;
use crate::engine::Remote;
use crate::region::RegionInfo;

/// Bytes of a strip.
const LEN: u64 = 1 << 22;
/// The remote side of the first strip.
const REMOTE: u64 = 1 << 40;
/// Bytes of each remote registration of the strip that has several.
const REGISTRATION: u64 = 700;
/// Where the local region ends that the fourth strip begins in: the first run of neighbours crosses it.
const BORDER: u64 = 300;

/// An engine's regions: there is a border within the last strip.
pub(super) fn regions() -> [Range<u64>; 2] {
    let (last, end) = (STRIPS_AT + (STRIPS as u64 - 1) * LEN, STRIPS_AT + STRIPS as u64 * LEN);
    [REGION..last + BORDER, last + BORDER..end]
}

/// How far the strips of an engine are used.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Strips([Used; STRIPS]);

#[derive(Clone, Copy, Debug, Default)]
struct Used {
    local: u64,
    remote: u64,
}

impl Strips {
    /// Finds a place for a plan that is to lie on a strip; it may have to be shorter there.
    pub(super) fn lay(&mut self, plan: &Plan) -> (Plan, Option<Place>) {
        let mut plan = plan.clone();
        let PlanOp::Transfer { strip: Some(strip), ref mut parts, .. } = plan.op else { return (plan, None) };
        let Strip { number, gap, declared } = strip;
        let used = &mut self.0[number as usize];
        used.local += u64::from(matches!(gap, Gap::Local | Gap::Both));
        used.remote += u64::from(matches!(gap, Gap::Remote | Gap::Both));
        let mut len = u64::from(parts[0]);
        if number == 2 {
            len = len.min(REGISTRATION - used.remote % REGISTRATION);
        }
        let first = number != 3 || used.local < BORDER;
        if number == 3 && first {
            len = len.min(BORDER - used.local);
        }
        parts[0] = len as u8;
        let Used { mut local, mut remote } = *used;
        (used.local, used.remote) = (local + len, remote + len);
        if number == 1 {
            (local, remote) = (LEN - local - len, LEN - remote - len);
        }
        let (local, remote) = (STRIPS_AT + u64::from(number) * LEN + local, REMOTE + u64::from(number) * LEN + remote);
        let registration = declared.then(|| registration(number, remote));
        (plan, Some(Place { local, remote, region: usize::from(!first), registration }))
    }
}

/// Where the remote registration begins that has an address.
fn registration(strip: u8, remote: u64) -> u64 {
    let start = REMOTE + u64::from(strip) * LEN;
    if strip == 2 { remote - (remote - start) % REGISTRATION } else { start }
}

/// The remote side of a place.
pub(super) fn remote(segment: &Segment, place: Place, len: u64) -> Remote {
    let Some(address) = place.registration else { return segment.at(place.remote) };
    let several = (place.remote - REMOTE) / LEN == 2;
    let info =
        RegionInfo { segment: segment.name().to_owned(), address, len: if several { REGISTRATION } else { LEN } };
    segment.slice(&info, place.remote - address, len).expect("it lies in its registration")
}
