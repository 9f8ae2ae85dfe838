//! The index ring under both queues: one producer, one consumer, positions that only grow.
//!
//! Each side keeps its own position and a copy of the other's, so that it touches the shared words once per batch and
//! not once per entry. A written entry is invisible until [`Producer::publish`]; a read one keeps its place until
//! [`Consumer::release`].

use std::fmt;
use std::mem::MaybeUninit;
use std::{ptr, slice};

use crossbeam_utils::CachePadded;

use crate::sync::{Arc, AtomicU64, Ordering, UnsafeCell};

struct Shared<T: Leftover> {
    /// First position that the consumer has not released.
    head: CachePadded<AtomicU64>,
    /// First position that the producer has not published.
    tail: CachePadded<AtomicU64>,
    /// A power of two of places; position `p` lives in place `p & (len - 1)`.
    places: Box<[UnsafeCell<MaybeUninit<T>>]>,
}

// SAFETY: a place is written only by the producer while its position is outside `head..tail`, and read only by the
// consumer while inside; `tail` is published with Release and read with Acquire, `head` likewise.
unsafe impl<T: Leftover> Sync for Shared<T> {}
// SAFETY: as above; the places hold `T: Send`.
unsafe impl<T: Leftover> Send for Shared<T> {}

type Place<T> = UnsafeCell<MaybeUninit<T>>;

impl<T: Leftover> Shared<T> {
    #[inline]
    fn place(&self, position: u64) -> &Place<T> {
        place_of(&self.places, position)
    }
}

/// The places from a position on, at most `most`, and not beyond the last place: for loops that need no mask.
#[inline]
fn run_of<T>(places: &[Place<T>], position: u64, most: usize) -> &[Place<T>] {
    let (_, rest) = places.split_at(position as usize & (places.len() - 1));
    &rest[..most.min(rest.len())]
}

/// The same for writing, and how far from each of them the place ahead is that is to be asked for: one number for all of them,
/// so they end where the places ahead begin anew.
#[inline]
fn run_to_write<T>(places: &[Place<T>], position: u64, most: usize) -> (&[Place<T>], isize) {
    let len = places.len();
    let ahead = ahead::<T>() as usize & (len - 1);
    let run = run_of(places, position, most);
    let before = (len - ahead).saturating_sub(position as usize & (len - 1));
    match before {
        0 => (run, ahead as isize - len as isize),
        _ => (&run[..before.min(run.len())], ahead as isize),
    }
}

/// For loops, which keep where the places are in registers: as far as the compiler knows, a write to a place may change that.
#[inline]
fn place_of<T>(places: &[Place<T>], position: u64) -> &Place<T> {
    let index = position as usize & (places.len() - 1);
    // SAFETY: `ring` made the places, a power of two of them, so the mask keeps the index below their number.
    unsafe { places.get_unchecked(index) }
}

/// What becomes of an entry that was written and that no consumer will read.
pub(crate) trait Leftover: Copy + Send {
    /// Lets go of what the entry owns.
    fn discard(self);
}

/// A ring of at least `entries` places, rounded up to a power of two.
pub(crate) fn ring<T: Leftover>(entries: usize) -> (Producer<T>, Consumer<T>) {
    let len = entries.next_power_of_two();
    let shared = Arc::new(Shared {
        head: CachePadded::new(AtomicU64::new(0)),
        tail: CachePadded::new(AtomicU64::new(0)),
        places: (0..len).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
    });
    (
        Producer { shared: Arc::clone(&shared), tail: 0, published: 0, end: 0, head: 0 },
        Consumer { shared, at: Read { head: 0, released: 0, tail: 0 } },
    )
}

pub(crate) struct Producer<T: Leftover> {
    shared: Arc<Shared<T>>,
    /// Next position to write; `published..tail` is written and not yet visible.
    tail: u64,
    published: u64,
    /// The next position that needs another look.
    end: u64,
    /// The consumer's head as last seen.
    head: u64,
}

impl<T: Leftover> Producer<T> {
    pub(crate) fn capacity(&self) -> usize {
        self.shared.places.len()
    }

    /// Free places, looking at the consumer's position only when the copy of it shows none. Opens all of them.
    #[inline]
    pub(crate) fn room(&mut self) -> usize {
        if !self.is_open() {
            self.open(u64::MAX);
        }
        (self.end - self.tail) as usize
    }

    /// Asks for the word that a publish writes. A consumer that waits for entries looks at it all the time, so that the publish would
    /// wait for it.
    #[inline]
    pub(crate) fn expect_publish(&self) {
        expect_write(ptr::from_ref(&self.shared.tail));
    }

    /// True if the next position may be written.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.tail < self.end
    }

    /// Lets positions be written up to `end`, as far as they are free. True if the next one is.
    pub(crate) fn open(&mut self, end: u64) -> bool {
        let len = self.capacity() as u64;
        if end > self.head + len {
            self.head = self.shared.head.load(Ordering::Acquire);
        }
        self.end = end.min(self.head + len);
        self.is_open()
    }

    /// How many positions are open.
    pub(crate) fn opened(&self) -> u64 {
        self.end.saturating_sub(self.tail)
    }

    /// Lets no further position be written until one is opened.
    pub(crate) fn shut(&mut self) {
        self.end = self.tail;
    }

    /// The same by a fresh look, changing nothing.
    pub(crate) fn has_room_now(&self) -> bool {
        self.tail - self.shared.head.load(Ordering::Relaxed) < self.capacity() as u64
    }

    /// Writes the next entry, unpublished; gives it back when the ring is full.
    #[inline]
    pub(crate) fn write(&mut self, value: T) -> Result<(), T> {
        if self.room() == 0 {
            return Err(value);
        }
        self.write_opened(value)
    }

    /// Writes the next entry, unpublished, if its position is open; else gives it back.
    #[inline]
    pub(crate) fn write_opened(&mut self, value: T) -> Result<(), T> {
        if !self.is_open() {
            return Err(value);
        }
        write_at(&self.shared.places, self.tail, value);
        self.tail += 1;
        Ok(())
    }

    /// Writes the next entries, unpublished, as many as there are or as there is room for up to the last place. How many; 0
    /// only without entries or room.
    #[inline]
    pub(crate) fn write_many(&mut self, values: impl Iterator<Item = T>) -> usize {
        let room = self.room();
        let (run, ahead) = run_to_write(&self.shared.places, self.tail, room);
        let mut count = 0;
        for (place, value) in run.iter().zip(values) {
            expect_write(ptr::from_ref(place).wrapping_offset(ahead));
            write_place(place, value);
            count += 1;
        }
        self.tail += count as u64;
        count
    }

    /// Takes back the entry written last, if it is not published.
    pub(crate) fn unwrite(&mut self) -> Option<T> {
        if self.tail == self.published {
            return None;
        }
        self.tail -= 1;
        // Written by `write` and never published, so it is initialised and still ours.
        Some(read_place(self.shared.place(self.tail)))
    }

    /// Changes the entry written last, if it is not published.
    pub(crate) fn amend(&mut self, change: impl FnOnce(&mut T)) {
        if let Some(mut last) = self.unwrite() {
            change(&mut last);
            write_place(self.shared.place(self.tail), last);
            self.tail += 1;
        }
    }

    /// Entries written and not yet published.
    #[inline]
    pub(crate) fn unpublished(&self) -> usize {
        (self.tail - self.published) as usize
    }

    /// What is written and not yet published, in its places.
    pub(crate) fn written(&self) -> impl Iterator<Item = &T> {
        (self.published..self.tail).map(|position| see_place(self.shared.place(position)))
    }

    /// The next position to write.
    #[inline]
    pub(crate) fn position(&self) -> u64 {
        self.tail
    }

    /// The position after the last published entry.
    #[inline]
    pub(crate) fn published(&self) -> u64 {
        self.published
    }

    /// The position before which the consumer has given every place back, by a fresh look.
    pub(crate) fn released(&self) -> u64 {
        self.shared.head.load(Ordering::Relaxed)
    }

    /// Makes everything written visible to the consumer at once.
    #[inline]
    pub(crate) fn publish(&mut self) -> usize {
        let count = self.unpublished();
        if count > 0 {
            self.published = self.tail;
            self.shared.tail.store(self.tail, Ordering::Release);
        }
        count
    }
}

impl<T: Leftover> Drop for Producer<T> {
    fn drop(&mut self) {
        // The consumer, or the last of both sides, deals with what was written.
        self.publish();
    }
}

pub(crate) struct Consumer<T: Leftover> {
    shared: Arc<Shared<T>>,
    at: Read,
}

/// What a consumer knows of the positions.
struct Read {
    /// Next position to read; `released..head` is read and still holds its place.
    head: u64,
    released: u64,
    /// The producer's tail as last seen.
    tail: u64,
}

impl<T: Leftover> Consumer<T> {
    /// The next entry, looking at the producer's position only when the copy of it shows none.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<T> {
        let Consumer { shared, at } = self;
        if at.head == at.tail {
            at.look(shared);
            if at.head == at.tail {
                return None;
            }
            at.ask(shared, 0);
        }
        let places = &*shared.places;
        if at.head + ahead::<T>() < at.tail {
            expect_read(place_of(places, at.head + ahead::<T>()));
        }
        let value = read_place(place_of(places, at.head));
        at.head += 1;
        Some(value)
    }

    /// The next entries one by one, for a loop.
    #[inline]
    pub(crate) fn entries(&mut self) -> Entries<'_, T> {
        Entries { shared: &self.shared, at: &mut self.at, run: [].iter() }
    }

    /// The `most` next entries, or as many as there are up to the last place, in their places.
    #[inline]
    pub(crate) fn peek_many(&mut self, most: usize) -> impl Iterator<Item = &T> {
        let Consumer { shared, at } = self;
        if at.head == at.tail {
            at.look(shared);
        }
        let most = most.min((at.tail - at.head) as usize);
        run_of(&shared.places, at.head, most).iter().map(see_place)
    }

    /// Looks at the producer's position, and at no place: true if there is something to read.
    #[inline]
    pub(crate) fn look_again(&mut self) -> bool {
        self.at.look(&self.shared);
        !self.is_drained()
    }

    /// True if the last look showed nothing to read.
    #[inline]
    pub(crate) fn is_drained(&self) -> bool {
        self.at.head == self.at.tail
    }

    /// Leaves entries behind that `peek_many` has shown.
    #[inline]
    pub(crate) fn skip(&mut self, count: usize) {
        debug_assert!(count as u64 <= self.at.tail - self.at.head);
        self.at.head += count as u64;
    }

    pub(crate) fn capacity(&self) -> usize {
        self.shared.places.len()
    }

    /// Gives the places of everything read back to the producer; how many.
    #[inline]
    pub(crate) fn release(&mut self) -> usize {
        self.entries().release()
    }

    /// Entries published and not read, by a fresh look. Acquire: what came before them is visible to who only counts them, such
    /// as the units that were given back.
    pub(crate) fn ready(&self) -> usize {
        self.at.ready(&self.shared)
    }

    /// The entry at a position, if it is published and was not read.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn published_at(&self, position: u64) -> Option<T> {
        let there = (self.at.head..self.shared.tail.load(Ordering::Acquire)).contains(&position);
        there.then(|| read_place(self.shared.place(position)))
    }

    /// The position of the next entry to read.
    #[inline]
    pub(crate) fn position(&self) -> u64 {
        self.at.head
    }
}

impl Read {
    /// Looks at the producer's position.
    #[inline]
    fn look<T: Leftover>(&mut self, shared: &Shared<T>) {
        self.tail = shared.tail.load(Ordering::Acquire);
    }

    fn ready<T: Leftover>(&self, shared: &Shared<T>) -> usize {
        (shared.tail.load(Ordering::Acquire) - self.head) as usize
    }

    /// Asks for as many places as both sides ask for ahead, of those that are published, `beyond` the next one.
    fn ask<T: Leftover>(&self, shared: &Shared<T>, beyond: u64) {
        let first = self.head + beyond;
        let end = self.tail.min(first + ahead::<T>());
        for position in (first..end).step_by((LINE / size_of::<T>()).max(1)) {
            expect_read(shared.place(position));
        }
    }

    /// The next places, as many as are asked for ahead and are in one run, when those after them are asked for.
    #[inline(never)]
    fn next_run<'a, T: Leftover>(&mut self, shared: &'a Shared<T>) -> &'a [Place<T>] {
        if self.head == self.tail {
            self.look(shared);
            self.ask(shared, 0);
        }
        self.ask(shared, ahead::<T>());
        run_of(&shared.places, self.head, (self.tail - self.head).min(ahead::<T>()) as usize)
    }
}

/// A consumer's entries from the next on. Where a run of them is stays in registers, in the loop of whoever takes them.
pub(crate) struct Entries<'a, T: Leftover> {
    shared: &'a Shared<T>,
    at: &'a mut Read,
    /// The places from `head` on that may be read without another look.
    run: slice::Iter<'a, Place<T>>,
}

impl<T: Leftover> Entries<'_, T> {
    /// As [`Consumer::next`].
    #[inline]
    pub(crate) fn next(&mut self) -> Option<T> {
        if self.run.as_slice().is_empty() {
            self.run = self.at.next_run(self.shared).iter();
        }
        let place = self.run.next()?;
        self.at.head += 1;
        Some(read_place(place))
    }

    /// As [`Consumer::release`].
    #[inline]
    pub(crate) fn release(&mut self) -> usize {
        let Read { head, released, .. } = self.at;
        let count = *head - *released;
        if count > 0 {
            *released = *head;
            self.shared.head.store(*head, Ordering::Release);
        }
        count as usize
    }

    /// As [`Consumer::ready`].
    pub(crate) fn ready(&self) -> usize {
        self.at.ready(self.shared)
    }

    pub(crate) fn capacity(&self) -> usize {
        self.shared.places.len()
    }
}

impl<T: Leftover> Drop for Consumer<T> {
    fn drop(&mut self) {
        self.release();
    }
}

impl<T: Leftover> Drop for Shared<T> {
    fn drop(&mut self) {
        // Both sides are gone, so what lies between them is nobody's. The consumer gave back what it read when it was dropped.
        let tail = self.tail.load(Ordering::Relaxed);
        for position in self.head.load(Ordering::Relaxed)..tail {
            read_place(self.place(position)).discard();
        }
    }
}

/// Writes the entry at a position, and asks for a place ahead.
#[inline]
fn write_at<T>(places: &[Place<T>], position: u64, value: T) {
    expect_write(place_of(places, position + ahead::<T>()));
    write_place(place_of(places, position), value);
}

#[cfg(not(loom))]
#[inline]
fn write_place<T>(place: &Place<T>, value: T) {
    // SAFETY: only the producer calls this, for a position outside `head..tail`, which the consumer does not touch.
    unsafe { (*place.get()).write(value) };
}

/// How many bytes ahead both sides ask for places: 32 cache lines.
const AHEAD: u64 = 2048;
/// Bytes of a cache line.
const LINE: usize = 64;

const fn ahead<T>() -> u64 {
    AHEAD / size_of::<T>() as u64
}

/// Fetches a published place's cache line for reading. Not of one that is not published: that would take it from the producer.
#[inline]
fn expect_read<T>(place: &Place<T>) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: a hint, whatever the address, for an instruction that each such processor has.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.get().cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = place;
}

/// Fetches a place's cache line for writing. Its last user was the other side, on another core, so that the write would wait
/// for it.
#[inline]
fn expect_write<T>(place: *const T) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: a hint, whatever the address: it reads and writes nothing that a program could see. Processors without it take it
    // for a NOP.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = place;
}

#[cfg(not(loom))]
#[inline]
fn read_place<T: Copy>(place: &Place<T>) -> T {
    // SAFETY: callers read positions that were written, and that nobody writes until they are released.
    unsafe { (*place.get()).assume_init_read() }
}

#[cfg(not(loom))]
#[inline]
fn see_place<T>(place: &Place<T>) -> &T {
    // SAFETY: as for `read_place`; the reference borrows the side that has the place, which publishes or releases it first.
    unsafe { (*place.get()).assume_init_ref() }
}

#[cfg(loom)]
fn see_place<T>(place: &Place<T>) -> &T {
    // SAFETY: as without loom, which checks the access here.
    place.with(|place| unsafe { (*place).assume_init_ref() })
}

#[cfg(loom)]
fn write_place<T>(place: &Place<T>, value: T) {
    // SAFETY: as without loom, which checks it here.
    place.with_mut(|place| unsafe { (*place).write(value) });
}

#[cfg(loom)]
fn read_place<T: Copy>(place: &Place<T>) -> T {
    // SAFETY: as without loom, which checks it here.
    place.with(|place| unsafe { (*place).assume_init_read() })
}

impl<T: Leftover> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer").field("tail", &self.tail).field("published", &self.published).finish_non_exhaustive()
    }
}

impl<T: Leftover> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("head", &self.at.head)
            .field("released", &self.at.released)
            .finish_non_exhaustive()
    }
}

impl<T: Leftover> fmt::Debug for Entries<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entries")
            .field("head", &self.at.head)
            .field("released", &self.at.released)
            .finish_non_exhaustive()
    }
}
