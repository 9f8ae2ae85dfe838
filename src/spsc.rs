//! The index ring under both queues: one producer, one consumer, positions that only grow.
//!
//! Each side keeps its own position and a copy of the other's, so that it touches the shared words once per batch and
//! not once per entry. A written entry is invisible until [`Producer::publish`]; a read one keeps its place until
//! [`Consumer::release`].

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Range;
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

/// The same for writing, and how many bytes from each of them the place ahead is that is to be asked for: one number for all of
/// them, so they end where the places ahead begin anew.
#[inline]
fn run_to_write<T>(places: &[Place<T>], position: u64, most: usize) -> (&[Place<T>], isize) {
    let len = places.len();
    let ahead = ahead::<T>() as usize & (len - 1);
    let run = run_of(places, position, most);
    let before = (len - ahead).saturating_sub(position as usize & (len - 1));
    let bytes = |places: usize| (places * size_of::<T>()) as isize;
    match before {
        0 => (run, bytes(ahead) - bytes(len)),
        _ => (&run[..before.min(run.len())], bytes(ahead)),
    }
}

#[inline]
fn places_in<T>(run: &Range<*const Place<T>>) -> usize {
    (run.end.addr() - run.start.addr()) / size_of::<Place<T>>()
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
    let first = shared.places.as_ptr();
    (
        Producer {
            shared: Arc::clone(&shared),
            run: first..first,
            run_end: 0,
            ahead: 0,
            published: 0,
            end: 0,
            head: 0,
        },
        Consumer { shared, at: Read { head: 0, released: 0, tail: 0 } },
    )
}

pub(crate) struct Producer<T: Leftover> {
    shared: Arc<Shared<T>>,
    /// Open places from the next position on, one after the other. Pointers into `shared`, so that writing an entry takes nothing
    /// from there, and no mask.
    run: Range<*const Place<T>>,
    /// The position after the run's last.
    run_end: u64,
    /// How far from each place of the run the one is that is to be asked for.
    ahead: isize,
    published: u64,
    /// The next position that needs another look, in this run or beyond.
    end: u64,
    /// The consumer's head as last seen.
    head: u64,
}

// SAFETY: the pointers lead to places of `shared`, which is Send.
unsafe impl<T: Leftover> Send for Producer<T> {}

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
        self.opened() as usize
    }

    /// Asks for the word that a publish writes. A consumer that waits for entries looks at it all the time, so that the publish would
    /// wait for it.
    #[inline]
    pub(crate) fn expect_publish(&self) {
        expect_write(ptr::from_ref(&self.shared.tail));
    }

    /// True if the next position may be written. False as well at the end of a run: [`go_on`](Self::go_on).
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        !self.run.is_empty()
    }

    /// The same, and at the end of a run begins the next.
    pub(crate) fn go_on(&mut self) -> bool {
        if !self.is_open() {
            self.begin_run(self.position());
        }
        self.is_open()
    }

    /// Lets positions be written up to `end`, as far as they are free. True if the next one is.
    pub(crate) fn open(&mut self, end: u64) -> bool {
        let len = self.capacity() as u64;
        if end > self.head + len {
            self.head = self.shared.head.load(Ordering::Acquire);
        }
        self.end = end.min(self.head + len);
        self.begin_run(self.position());
        self.is_open()
    }

    /// The next position is this one.
    fn begin_run(&mut self, position: u64) {
        let (run, ahead) = run_to_write(&self.shared.places, position, self.end.saturating_sub(position) as usize);
        (self.run, self.run_end, self.ahead) = (run.as_ptr_range(), position + run.len() as u64, ahead);
    }

    #[inline]
    fn run(&self) -> &[Place<T>] {
        // SAFETY: `begin_run` has it from a slice of `shared`'s places, and writing moved its start towards its end.
        unsafe { slice::from_raw_parts(self.run.start, places_in(&self.run)) }
    }

    /// How many positions are open.
    pub(crate) fn opened(&self) -> u64 {
        self.end.saturating_sub(self.position())
    }

    /// Lets no further position be written until one is opened.
    pub(crate) fn shut(&mut self) {
        (self.run_end, self.run.end) = (self.position(), self.run.start);
        self.end = self.run_end;
    }

    /// The same by a fresh look, changing nothing.
    pub(crate) fn has_room_now(&self) -> bool {
        self.position() - self.shared.head.load(Ordering::Relaxed) < self.capacity() as u64
    }

    /// Writes the next entry, unpublished; gives it back when the ring is full.
    #[inline]
    pub(crate) fn write(&mut self, value: T) -> Result<(), T> {
        if self.is_open() || self.open(u64::MAX) { self.write_opened(value) } else { Err(value) }
    }

    /// Writes the next entry, unpublished, if its position [is open](Self::is_open); else gives it back.
    #[inline]
    pub(crate) fn write_opened(&mut self, value: T) -> Result<(), T> {
        if !self.is_open() {
            return Err(value);
        }
        expect_write(self.run.start.wrapping_byte_offset(self.ahead));
        // SAFETY: it is not at its end, so it is one of `shared`'s places.
        write_place(unsafe { &*self.run.start }, value);
        self.run.start = self.run.start.wrapping_add(1);
        Ok(())
    }

    /// Writes the next entries, unpublished, as many as there are or as there is room for up to the last place. How many; 0
    /// only without entries or room.
    #[inline]
    pub(crate) fn write_many(&mut self, values: impl Iterator<Item = T>) -> usize {
        if !self.is_open() {
            self.open(u64::MAX);
        }
        let mut count = 0;
        for (place, value) in self.run().iter().zip(values) {
            expect_write(ptr::from_ref(place).wrapping_byte_offset(self.ahead));
            write_place(place, value);
            count += 1;
        }
        self.run.start = self.run.start.wrapping_add(count);
        count
    }

    /// Takes back the entry written last, if it is not published.
    pub(crate) fn unwrite(&mut self) -> Option<T> {
        let last = *self.last()?;
        self.begin_run(self.position() - 1);
        Some(last)
    }

    /// The entry written last, if it is not published.
    #[inline]
    pub(crate) fn last(&self) -> Option<&T> {
        (self.unpublished() > 0).then(|| see_place(self.shared.place(self.position() - 1)))
    }

    /// Changes it.
    pub(crate) fn amend(&mut self, change: impl FnOnce(&mut T)) {
        if let Some(&last) = self.last() {
            let mut last = last;
            change(&mut last);
            write_place(self.shared.place(self.position() - 1), last);
        }
    }

    /// Entries written and not yet published.
    #[inline]
    pub(crate) fn unpublished(&self) -> usize {
        (self.position() - self.published) as usize
    }

    /// What is written and not yet published, in its places.
    pub(crate) fn written(&self) -> impl Iterator<Item = &T> {
        (self.published..self.position()).map(|position| see_place(self.shared.place(position)))
    }

    /// The next position to write.
    #[inline]
    pub(crate) fn position(&self) -> u64 {
        self.run_end - places_in(&self.run) as u64
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
            self.published += count as u64;
            self.shared.tail.store(self.published, Ordering::Release);
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
            expect_read(ptr::from_ref(place_of(places, at.head + ahead::<T>())));
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
    pub(crate) fn peek_many(&mut self, most: usize) -> impl Iterator<Item = &T> + Clone {
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
        self.at.release(&self.shared)
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

    #[inline]
    fn release<T: Leftover>(&mut self, shared: &Shared<T>) -> usize {
        let count = self.head - self.released;
        if count > 0 {
            self.released = self.head;
            shared.head.store(self.head, Ordering::Release);
        }
        count as usize
    }

    fn ready<T: Leftover>(&self, shared: &Shared<T>) -> usize {
        (shared.tail.load(Ordering::Acquire) - self.head) as usize
    }

    /// Asks for as many places as both sides ask for ahead, of those that are published, `beyond` the next one.
    fn ask<T: Leftover>(&self, shared: &Shared<T>, beyond: u64) {
        let first = self.head + beyond;
        let end = self.tail.min(first + ahead::<T>());
        let mut position = first;
        while position < end {
            let run = run_of(&shared.places, position, (end - position) as usize);
            let line = (LINE / size_of::<T>()).max(1);
            for at in 0..run.len().div_ceil(line) {
                expect_read(run.as_ptr().wrapping_add(at * line));
            }
            position += run.len() as u64;
        }
    }

    /// Takes the next places, as many as are asked for ahead and are in one run, when those after them are asked for.
    #[inline(never)]
    fn next_run<'a, T: Leftover>(&mut self, shared: &'a Shared<T>) -> &'a [Place<T>] {
        if self.head == self.tail {
            self.look(shared);
            self.ask(shared, 0);
        }
        self.ask(shared, ahead::<T>());
        let run = run_of(&shared.places, self.head, (self.tail - self.head).min(ahead::<T>()) as usize);
        self.head += run.len() as u64;
        run
    }
}

/// A consumer's entries from the next on. Where a run of them is stays in registers, in the loop of whoever takes them.
pub(crate) struct Entries<'a, T: Leftover> {
    shared: &'a Shared<T>,
    /// Behind the run: what is left of that goes back when this is dropped.
    at: &'a mut Read,
    /// The places before `head` that may be read without another look.
    run: slice::Iter<'a, Place<T>>,
}

impl<T: Leftover> Entries<'_, T> {
    /// As [`Consumer::next`].
    #[inline]
    pub(crate) fn next(&mut self) -> Option<T> {
        if self.run.as_slice().is_empty() {
            self.run = self.at.next_run(self.shared).iter();
        }
        self.run.next().map(read_place)
    }

    /// As [`Consumer::release`].
    #[inline]
    pub(crate) fn release(&mut self) -> usize {
        self.end_run();
        self.at.release(self.shared)
    }

    /// Gives what is left of the run back, to be read later.
    #[inline]
    fn end_run(&mut self) {
        self.at.head -= self.run.len() as u64;
        self.run = [].iter();
    }

    /// As [`Consumer::ready`].
    pub(crate) fn ready(&self) -> usize {
        self.at.ready(self.shared) + self.run.len()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.shared.places.len()
    }
}

impl<T: Leftover> Drop for Entries<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.end_run();
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
fn expect_read<T>(place: *const T) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: a hint, whatever the address, for an instruction that each such processor has.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = place;
}

/// Fetches the cache line of a place, or of something else, for writing. Its last user was on another core, so that the write
/// would wait for it.
#[inline]
pub(crate) fn expect_write<T>(place: *const T) {
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
        f.debug_struct("Producer")
            .field("tail", &self.position())
            .field("published", &self.published)
            .finish_non_exhaustive()
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
