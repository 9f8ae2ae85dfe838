//! Stand-ins for what knows no loom. Their insides are taken as correct; what loom has to see is what they order
//! for us, so each gives the happens-before that its original gives, from an item's push to its pop, and no more.

use std::collections::VecDeque;
use std::sync::{Mutex as StdMutex, MutexGuard, OnceLock as StdOnceLock, PoisonError};
use std::task::Waker;

use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Most items of a queue in a model, and the number of its marks.
const MARKS: usize = 8;

/// Like crossbeam's queues: any number of producers and consumers.
#[derive(Debug)]
struct Queue<T> {
    capacity: usize,
    /// Never held over one of loom's own steps.
    items: StdMutex<Items<T>>,
    /// One for each item in turn, set at its push and reset at its pop: what orders the one before the other.
    marks: [AtomicBool; MARKS],
    /// How often pushed and popped, as far as the thread that looks can see.
    pushed: AtomicU64,
    popped: AtomicU64,
}

#[derive(Debug)]
struct Items<T> {
    filled: VecDeque<(T, usize)>,
    /// Places ever taken, and given back.
    taken: usize,
    given: usize,
}

impl<T> Queue<T> {
    fn new(capacity: usize) -> Self {
        Queue {
            capacity,
            items: StdMutex::new(Items { filled: VecDeque::new(), taken: 0, given: 0 }),
            marks: std::array::from_fn(|_| AtomicBool::new(false)),
            pushed: AtomicU64::new(0),
            popped: AtomicU64::new(0),
        }
    }

    fn items(&self) -> MutexGuard<'_, Items<T>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, item: T) -> Result<(), T> {
        let place = {
            let mut items = self.items();
            if items.taken - items.given >= self.capacity {
                return Err(item);
            }
            items.taken += 1;
            assert!(items.taken - items.given <= MARKS, "a model uses small queues");
            items.taken % MARKS
        };
        // As in the originals: the place is taken first, then filled.
        self.pushed.fetch_add(1, Ordering::Relaxed);
        self.marks[place].store(true, Ordering::Release);
        self.items().filled.push_back((item, place));
        Ok(())
    }

    fn pop(&self) -> Option<T> {
        let (item, place) = loop {
            let filling = {
                let mut items = self.items();
                if let Some(first) = items.filled.pop_front() {
                    break first;
                }
                items.taken > items.given
            };
            if !filling {
                return None;
            }
            // The originals wait, too, for a place that was taken and is not filled.
            loom::thread::yield_now();
        };
        // An exchange reads the newest value, so it always meets the push's.
        assert!(self.marks[place].swap(false, Ordering::Acquire));
        self.popped.fetch_add(1, Ordering::Relaxed);
        self.items().given += 1;
        Some(item)
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        // `popped` first: read last, it could count what `pushed` did not.
        let popped = self.popped.load(Ordering::Relaxed);
        self.pushed.load(Ordering::Relaxed).wrapping_sub(popped) as usize
    }
}

#[derive(Debug)]
pub(crate) struct ArrayQueue<T>(Queue<T>);

impl<T> ArrayQueue<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        ArrayQueue(Queue::new(capacity))
    }

    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        self.0.push(item)
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.0.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

#[derive(Debug)]
pub(crate) struct SegQueue<T>(Queue<T>);

impl<T> SegQueue<T> {
    pub(crate) fn new() -> Self {
        SegQueue(Queue::new(usize::MAX))
    }

    pub(crate) fn push(&self, item: T) {
        assert!(self.0.push(item).is_ok());
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.0.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

#[derive(Debug)]
pub(crate) struct AtomicWaker(Mutex<Option<Waker>>);

impl AtomicWaker {
    pub(crate) fn new() -> Self {
        AtomicWaker(Mutex::new(None))
    }

    pub(crate) fn register(&self, waker: &Waker) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker.clone());
    }

    pub(crate) fn take(&self) -> Option<Waker> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn wake(&self) {
        if let Some(waker) = self.take() {
            waker.wake();
        }
    }
}

/// A value that is there once it is set, and seen to be there some time later.
#[derive(Debug)]
pub(crate) struct OnceLock<T> {
    value: StdOnceLock<T>,
    set: AtomicBool,
}

impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        OnceLock { value: StdOnceLock::new(), set: AtomicBool::new(false) }
    }

    pub(crate) fn get(&self) -> Option<&T> {
        if self.set.load(Ordering::Acquire) { self.value.get() } else { None }
    }

    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        self.value.set(value)?;
        self.set.store(true, Ordering::Release);
        Ok(())
    }

    /// One thread at a time.
    pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        if self.value.get().is_none() {
            assert!(self.set(make()).is_ok());
        }
        self.value.get().expect("just set")
    }
}
