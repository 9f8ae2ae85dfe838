//! How a core hears of a fence.
//!
//! A core that gates an entry on a fence pushes one [`Node`] of its own on the fence's list, once, however many entries
//! wait. Whoever settles the fence closes the list and moves each node to the stack in its core's [`Inbox`], and rings the
//! core's doorbell if it sleeps. Nodes are allocated by the core, so signalling allocates nothing and cannot fail.
//!
//! What it takes is cache lines that go from one core to the other. `docs/architecture.md` in the repository counts them.

use std::{mem, ptr};

use crossbeam_utils::CachePadded;
use event_listener::Event;

use crate::doorbell::Doorbell;
use crate::fork::Home;
use crate::sync::{self, Arc, AtomicBool, AtomicPtr, AtomicU64, Ordering, UnsafeCell, fence};

/// One core's interest in one fence or timeline. A fence's has one count, which moves: from the core to the fence's list, the
/// core's stack and back. A timeline's has a second one: it stays on the timeline's list, and is on the stack besides. On a cache
/// line of its own: who signals reads it, and beside it would be what the core writes all the time.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Node {
    inbox: Arc<Inbox>,
    /// The core's own name for it.
    pub(crate) key: NodeKey,
    /// Next on the fence's or timeline's list. Written before the node is published there, constant after.
    listed_next: UnsafeCell<*const Node>,
    /// What lies under it on the inbox's stack; null while it is on none.
    fired_next: AtomicPtr<Node>,
    /// A timeline's second count is not the timeline's but the stack's or the core's. Of the timeline's first core that is
    /// [`Registrations::first_fired`].
    fired: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeKey {
    Fence(u32),
    /// Whether the core was the first, too.
    Timeline(u32, bool),
}

impl NodeKey {
    fn is_first(self) -> bool {
        matches!(self, NodeKey::Timeline(_, true))
    }
}

// SAFETY: `listed_next` is written only before the node is published by a Release operation, see `Registrations::add`.
unsafe impl Sync for Node {}
// SAFETY: the raw pointers are nodes kept alive by their own counts; everything else is Send.
unsafe impl Send for Node {}

impl Node {
    pub(crate) fn new(inbox: Arc<Inbox>, key: NodeKey) -> Arc<Node> {
        Arc::new(Node {
            inbox,
            key,
            listed_next: UnsafeCell::new(ptr::null()),
            fired_next: AtomicPtr::new(ptr::null_mut()),
            fired: AtomicBool::new(false),
        })
    }

    /// Links it in front of `next` on a list. Mostly it stood alone before, and does so again: then its cache line, which who
    /// signalled last has too, is left as it is.
    ///
    /// # Safety
    /// Nobody else has the node.
    unsafe fn list_before(&self, next: *const Node) {
        // SAFETY: the caller's.
        unsafe {
            if sync::read(&self.listed_next) != next {
                sync::write(&self.listed_next, next);
            }
        }
    }

    /// The same on a stack.
    fn lay_on(&self, under: *mut Node) {
        if self.fired_next.load(Ordering::Relaxed) != under {
            self.fired_next.store(under, Ordering::Relaxed);
        }
    }
}

/// The end of a list or stack that takes no more nodes. Never dereferenced.
fn closed() -> *mut Node {
    ptr::without_provenance_mut(2)
}

/// A stack with nothing on it whose core sleeps, or is about to. Never dereferenced.
fn asleep() -> *mut Node {
    ptr::without_provenance_mut(4)
}

/// Added to the address of a node on a stack whose fence has signalled: so the core need not fetch the fence to ask it.
const SIGNALLED: usize = 1;

/// The nodes and threads that want to hear of one fence or timeline.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Registrations {
    /// Owns one count of each node on it; [`closed`] once the fence is settled.
    head: AtomicPtr<Node>,
    /// The first core that registered and its key for it, so that the common case needs no map: core above, key + 1
    /// below, 0 for none.
    first: AtomicU64,
    /// What [`Node::fired`] is for others, here for the first core of a timeline: who moves it has this cache line already, and
    /// the core fetches it for the value.
    first_fired: AtomicBool,
    /// Threads in [`Fence::wait_timeout`](super::Fence::wait_timeout).
    pub(super) threads: Event,
    pub(super) home: Home,
}

impl Registrations {
    pub(crate) fn new() -> Registrations {
        Registrations {
            head: AtomicPtr::new(ptr::null_mut()),
            first: AtomicU64::new(0),
            first_fired: AtomicBool::new(false),
            threads: Event::new(),
            home: Home::here(),
        }
    }

    /// Adds a node, or gives it back if the list is closed: the state is final and can be read.
    pub(crate) fn add(&self, node: Arc<Node>) -> Result<(), Arc<Node>> {
        let raw = Arc::into_raw(node).cast_mut();
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            if head == closed() {
                // SAFETY: `raw` came from `into_raw` above and was not published.
                return Err(unsafe { Arc::from_raw(raw) });
            }
            // SAFETY: nobody else has the node before the exchange below publishes it; then the list owns its count.
            unsafe { (*raw).list_before(head) };
            // Release: publishes the node; whoever walks the list from it has the nodes pushed before, too, because every push is
            // an exchange. Acquire: if the list was closed meanwhile, the state is read next.
            match self.head.compare_exchange_weak(head, raw, Ordering::Release, Ordering::Acquire) {
                Ok(_) => return Ok(()),
                Err(now) => head = now,
            }
        }
    }

    /// Adds a timeline's node, which can be fired from now on.
    pub(crate) fn add_for_good(&self, node: Arc<Node>) {
        // The second count.
        mem::forget(Arc::clone(&node));
        let added = self.add(node);
        debug_assert!(added.is_ok(), "a timeline's list is never closed");
    }

    fn fired<'a>(&'a self, node: &'a Node) -> &'a AtomicBool {
        if node.key.is_first() { &self.first_fired } else { &node.fired }
    }

    /// The core has taken its timeline's node off its stack, and is about to look at the value: from here on it can be fired
    /// again.
    pub(crate) fn rearm(&self, node: Arc<Node>) {
        let node = Arc::into_raw(node);
        // SAFETY: the list has a count too. Acquire: a value that is stored after this fires anew, one stored before is read by the
        // core after this. Release: the link was read. The timeline has the count that was ours.
        self.fired(unsafe { &*node }).swap(false, Ordering::AcqRel);
    }

    /// The key under which `core` registered, if it was the first to.
    #[inline]
    pub(crate) fn first_key(&self, core: u32) -> Option<u32> {
        let word = self.first.load(Ordering::Relaxed);
        ((word >> 32) as u32 == core && word as u32 != 0).then(|| word as u32 - 1)
    }

    /// Takes the place of the first core; false if another core has it. Core numbers start at 1.
    pub(crate) fn claim_first(&self, core: u32, key: u32) -> bool {
        let word = (u64::from(core) << 32) | u64::from(key + 1);
        self.first.compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Gives the place of the first core back, if `core` has it with this key.
    pub(crate) fn leave_first(&self, core: u32, key: u32) {
        let word = (u64::from(core) << 32) | u64::from(key + 1);
        // Only `core` itself reads its key, so nothing is handed over with it.
        let _ = self.first.compare_exchange(word, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Closes the list and hands every node to its core. `signalled` is how it ended.
    pub(crate) fn close(&self, signalled: bool) {
        let mut next = self.head.swap(closed(), Ordering::AcqRel);
        while !next.is_null() && next != closed() {
            // SAFETY: the list owned this count, and the swap gave the list to us.
            let node = unsafe { Arc::from_raw(next) };
            // SAFETY: constant since the node was published, which the swap acquired. Read before the core can have it.
            next = unsafe { sync::read(&node.listed_next) }.cast_mut();
            // The node was on this list alone, so it is on no stack.
            Inbox::push(node, signalled);
        }
        self.wake_threads();
    }

    /// The caller has stored the new state. A thread listens, has a barrier and looks at the state: with a barrier on both
    /// sides either we find the listener or the thread finds the state.
    fn wake_threads(&self) {
        fence(Ordering::SeqCst);
        // `notify` alone would allocate for an event that nobody has listened to yet. Who listened at a fork is not in the
        // child, where the event's lock may be held for ever.
        if self.threads.total_listeners() > 0 && self.home.is_here() {
            self.threads.notify(usize::MAX);
        }
    }

    /// Tells every core, and keeps the list: a timeline fires many times.
    ///
    /// The caller has stored the new value. A core adds its node, calls [`recheck_barrier`] and reads the value again:
    /// with a barrier on both sides either this walk finds the node or the core finds the value.
    pub(crate) fn fire_all(&self) {
        fence(Ordering::SeqCst);
        let mut next = self.head.load(Ordering::Acquire);
        while !next.is_null() && next != closed() {
            // SAFETY: the list keeps the node alive while it is on it; a timeline's list is only taken apart by `drop`.
            let node = unsafe { &*next };
            // With the barrier above a release: the value is seen by the core that finds the node on its stack, or takes it
            // afterwards. Acquire: the core, which has marked the node as taken, has read the link that `push` overwrites.
            if !self.fired(node).swap(true, Ordering::Acquire) {
                // SAFETY: the node's second count was the timeline's, and the exchange gave it to us.
                Inbox::push(unsafe { Arc::from_raw(next) }, false);
            }
            // SAFETY: constant since the node was published.
            next = unsafe { sync::read(&node.listed_next) }.cast_mut();
        }
        self.wake_threads();
    }
}

/// The core's half of the barrier in [`Registrations::fire_all`]: between adding a node and reading the value again.
pub(crate) fn recheck_barrier() {
    fence(Ordering::SeqCst);
}

impl Drop for Registrations {
    fn drop(&mut self) {
        // With `&mut self` nothing else can have stored it: an ordinary read.
        let mut next = self.head.load(Ordering::Relaxed);
        while !next.is_null() && next != closed() {
            // SAFETY: the list owned this count; `&mut self`: nobody else walks it.
            let node = unsafe { Arc::from_raw(next) };
            if let NodeKey::Timeline(..) = node.key
                && !self.fired(&node).swap(true, Ordering::Relaxed)
            {
                // SAFETY: the second count is ours, and nobody can fire the node any more.
                drop(unsafe { Arc::from_raw(next) });
            }
            // SAFETY: constant since the node was published.
            next = unsafe { sync::read(&node.listed_next) }.cast_mut();
        }
    }
}

/// Where a core hears from other threads about fences: a stack of fired nodes and the doorbell.
#[derive(Debug)]
pub(crate) struct Inbox {
    /// Owns one count of each node on it, whose address may have [`SIGNALLED`] added. With nothing on it: null while the core
    /// is awake, [`asleep`], or [`closed`] when it is gone. Alone on its cache line, which goes to and fro.
    stack: CachePadded<AtomicPtr<Node>>,
    doorbell: std::sync::Arc<Doorbell>,
}

impl Inbox {
    pub(crate) fn new(doorbell: std::sync::Arc<Doorbell>) -> Arc<Inbox> {
        Arc::new(Inbox { stack: CachePadded::new(AtomicPtr::new(ptr::null_mut())), doorbell })
    }

    /// Hands a node that is on no stack to its core.
    fn push(node: Arc<Node>, signalled: bool) {
        let raw = Arc::into_raw(node).cast_mut();
        // SAFETY: we own a count until the exchange below has succeeded.
        let node = unsafe { &*raw };
        let told = raw.map_addr(|address| address | if signalled { SIGNALLED } else { 0 });
        let mut sleeper = None;
        // Mostly the core is awake and nothing is there. To look first would bring the cache line here twice: to read, to write.
        let mut head = ptr::null_mut();
        // Release: publishes the link and everything before the signal.
        while let Err(now) = node.inbox.stack.compare_exchange(head, told, Ordering::Release, Ordering::Relaxed) {
            if now == closed() {
                // SAFETY: `raw` came from `into_raw` above and was not published.
                drop(unsafe { Arc::from_raw(raw) });
                return;
            }
            sleeper = (now == asleep()).then(|| std::sync::Arc::clone(&node.inbox.doorbell));
            node.lay_on(if sleeper.is_some() { ptr::null_mut() } else { now });
            head = now;
        }
        // From here on the core may be gone, and with it the inbox. If it was awake it looks before it sleeps.
        if let Some(doorbell) = sleeper {
            doorbell.ring_always();
        }
    }

    /// True if [`take_fired`](Self::take_fired) has something to do.
    #[inline]
    pub(crate) fn is_touched(&self) -> bool {
        !self.stack.load(Ordering::Relaxed).is_null()
    }

    /// The core's last look before it sleeps, with its doorbell armed: true if there are nodes to take. If there are none, who
    /// brings the first one rings.
    pub(crate) fn has_fired_before_sleep(&self) -> bool {
        // As an exchange: either we find the node, or who brings it finds this.
        match self.stack.compare_exchange(ptr::null_mut(), asleep(), Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => false,
            Err(now) => now != asleep() && now != closed(),
        }
    }

    /// What the core calls the node that fired last, which is not taken yet.
    pub(crate) fn last_fired(&self) -> Option<NodeKey> {
        let last = self.stack.load(Ordering::Relaxed).map_addr(|address| address & !SIGNALLED);
        let none = last.is_null() || last == asleep() || last == closed();
        // SAFETY: the stack has a count of each node on it, and only the core takes nodes off. It made the node, and the key, too.
        (!none).then(|| unsafe { (*last).key })
    }

    /// Takes every fired node, newest first, with whether its fence is known to have signalled. A timeline's is to be
    /// [rearmed](Registrations::rearm). The core is awake.
    pub(crate) fn take_fired(&self, mut each: impl FnMut(Arc<Node>, bool)) {
        self.drain(ptr::null_mut(), &mut each);
    }

    /// Takes nothing from now on: the core is gone.
    pub(crate) fn close(&self) {
        self.drain(closed(), &mut |_, _| ());
    }

    fn drain(&self, leave: *mut Node, each: &mut dyn FnMut(Arc<Node>, bool)) {
        if self.stack.load(Ordering::Relaxed) == closed() {
            return;
        }
        let mut next = self.stack.swap(leave, Ordering::Acquire);
        if next == asleep() {
            return;
        }
        while !next.is_null() {
            let signalled = next.addr() & SIGNALLED != 0;
            // SAFETY: the stack owned this count, and the swap gave the stack to us.
            let node = unsafe { Arc::from_raw(next.map_addr(|address| address & !SIGNALLED)) };
            next = node.fired_next.load(Ordering::Relaxed);
            node.lay_on(ptr::null_mut());
            each(node, signalled);
        }
    }
}
