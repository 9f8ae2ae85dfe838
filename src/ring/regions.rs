//! The regions that a producer has met lately: entries name them by number, so that making one counts nothing.

use std::num::NonZeroU64;
use std::sync::Arc;

use crate::Engine;
use crate::region::RegionInner;

/// So many are found without a lock, if their numbers differ here.
const RECENT: usize = 16;

/// For one producer.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    /// By the number's last bits. One that was unregistered meanwhile refuses uses.
    recent: [Option<Arc<RegionInner>>; RECENT],
}

impl Regions {
    /// The engine's region with this number; `None` if it is not registered any more.
    #[inline]
    pub(crate) fn of(&mut self, number: NonZeroU64, engine: &Engine) -> Option<&Arc<RegionInner>> {
        let place = &mut self.recent[number.get() as usize % RECENT];
        if place.as_ref().is_none_or(|known| known.number != number) {
            *place = engine.region(number);
        }
        place.as_ref()
    }
}
