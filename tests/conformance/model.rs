//! An executable model of io_uring's rules for links, drains, skips, timeouts and cancels, as Linux 6.18 behaves, and of
//! the places where moonring deviates on purpose.
//!
//! Time is abstract: timers fire, in order, when nothing else can run.

use std::collections::VecDeque;
use std::time::Duration;

use crate::program::{
    Done, ECANCELED, EINVAL, ENOENT, EOPNOTSUPP, ETIME, Entry, Flags, Op, Outcome, Program, Repeat, Step, Target,
};

/// Where moonring behaves otherwise than the kernel, on purpose. Each is a decision; what is not listed here is a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deviation {
    /// A Cancel also finds entries that have not started: linked behind another one, or held by a drain. io_uring answers
    /// `ENOENT` (P40), because it cannot see them; moonring owns its queue, and a transfer that nobody wants any more
    /// should not be started. A member of a chain ends when its turn comes, so that completions keep the chain's order,
    /// and it counts as cancelled at once; what a drain holds ends at once. LinkTimeouts stay invisible, as in io_uring
    /// (P41), and a TimeoutRemove sees only Timeouts that run.
    CancelQueued,
    /// A Cancel or TimeoutRemove outside a chain and without `IO_DRAIN` starts at once, even behind a drain. In io_uring
    /// it waits like everything else (P46), so a drain behind an entry that never ends cannot be got rid of.
    CancelBypassesDrain,
    /// A failed preparation below a head with `CQE_SKIP_SUCCESS` posts its own errno. io_uring posts only the head's
    /// `ECANCELED` (P21), and the cause is lost.
    RealErrnoUnderSkip,
    /// `IO_DRAIN` and `CQE_SKIP_SUCCESS` may be mixed: moonring counts entries, not completions. In io_uring every drain
    /// after the first skip fails with `EOPNOTSUPP` (P22).
    DrainWithSkip,
    /// A chain that fails its preparation drains nothing: it is over before a drain could begin. In io_uring its
    /// `IO_DRAIN` still holds up what follows.
    BadDrainHoldsNothing,
    /// Behind a drain that has ended, everything starts as usual. In io_uring what is submitted later still waits for all
    /// that is running, until nothing is held any more.
    DrainEndsWithItself,
    /// A LinkTimeout ends the entry before it. io_uring looks for its `user_data`, so that an older entry with the same
    /// one dies instead, and the guarded one lives on.
    LinkTimeoutKey,
    /// A submit that ends within a chain is refused: nothing is submitted, and the chain goes on with what is pushed next.
    /// io_uring ends the chain there (P06); with a polling thread, whether it does is a race.
    OpenChainRefused,
    /// An entry that fails its preparation does not stop the ones behind it: always `IORING_SETUP_SUBMIT_ALL` (P08, P34).
    SubmitAll,
}

impl Deviation {
    pub const ALL: [Deviation; 9] = [
        Deviation::CancelQueued,
        Deviation::CancelBypassesDrain,
        Deviation::RealErrnoUnderSkip,
        Deviation::DrainWithSkip,
        Deviation::BadDrainHoldsNothing,
        Deviation::DrainEndsWithItself,
        Deviation::LinkTimeoutKey,
        Deviation::OpenChainRefused,
        Deviation::SubmitAll,
    ];
}

/// Bugs planted in the model, to measure what random programs can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    HardlinkBreaksOnCancel,
    SkippedLinkTimeoutPosts,
    SkipOfFollowersKept,
    SkipHidesNoFollower,
    PositiveResultFails,
    EtimeSuccessIgnored,
    EmptyCancelAllNotFound,
    DrainAfterSkipRuns,
    BadMemberSparesItsHead,
    HardlinkSurvivesBadMember,
    MultishotTicksOnce,
    LinkTimeoutsInARow,
    LinkTimeoutTakesFollower,
    CancelEndsOnlyOne,
    DrainIgnored,
    LaterDoNotWaitForDrain,
}

impl Fault {
    pub const ALL: [Fault; 16] = [
        Fault::HardlinkBreaksOnCancel,
        Fault::SkippedLinkTimeoutPosts,
        Fault::SkipOfFollowersKept,
        Fault::SkipHidesNoFollower,
        Fault::PositiveResultFails,
        Fault::EtimeSuccessIgnored,
        Fault::EmptyCancelAllNotFound,
        Fault::DrainAfterSkipRuns,
        Fault::BadMemberSparesItsHead,
        Fault::HardlinkSurvivesBadMember,
        Fault::MultishotTicksOnce,
        Fault::LinkTimeoutsInARow,
        Fault::LinkTimeoutTakesFollower,
        Fault::CancelEndsOnlyOne,
        Fault::DrainIgnored,
        Fault::LaterDoNotWaitForDrain,
    ];
}

/// Whose rules.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    deviations: &'static [Deviation],
    /// A result counts at once, not at the end of its submit. Only a Cancel in the same submit can tell, and neither is
    /// promised.
    prompt: bool,
    /// A deviation that is missing after all.
    without: Option<Deviation>,
    fault: Option<Fault>,
    /// Of the timers that fire, the latest is the first to.
    clock_backwards: bool,
}

impl Rules {
    /// The kernel's, which stops a submit at a bad entry unless the ring was set up with `SUBMIT_ALL`.
    pub fn kernel(submit_all: bool) -> Rules {
        let deviations: &[_] = if submit_all { &[Deviation::SubmitAll] } else { &[] };
        Rules { deviations, prompt: false, without: None, fault: None, clock_backwards: false }
    }

    pub fn moonring() -> Rules {
        Rules { deviations: &Deviation::ALL, prompt: true, without: None, fault: None, clock_backwards: false }
    }

    pub fn with(self, fault: Fault) -> Rules {
        Rules { fault: Some(fault), ..self }
    }

    pub fn without(self, deviation: Deviation) -> Rules {
        Rules { without: Some(deviation), ..self }
    }

    /// As good an order as the clock's, to a program whose outcome must not depend on it.
    pub fn with_clock_backwards(self) -> Rules {
        Rules { clock_backwards: true, ..self }
    }

    fn deviate(&self, deviation: Deviation) -> bool {
        self.deviations.contains(&deviation) && self.without != Some(deviation)
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }
}

/// What the model says.
#[derive(Debug)]
pub struct Prediction {
    pub outcome: Outcome,
    /// What was submitted, chain by chain, an entry alone being one.
    pub chains: Vec<Vec<Entry>>,
    /// The kernel uses worker threads: its completions come later, and in no order.
    pub parallel: bool,
    /// The `user_data` of what no drain put in order: it failed its preparation, or was cancelled before it started.
    pub never_drained: Vec<u64>,
}

/// What should come of `program`. Steps behind a submit that stopped early are left out.
pub fn predict(program: &Program, rules: Rules) -> Prediction {
    let mut model = Model::new(rules);
    let mut outcome = Outcome::default();
    let mut chains = Vec::new();
    let mut pushed = Vec::new();
    for entries in &program.steps {
        pushed.extend_from_slice(entries);
        if rules.deviate(Deviation::OpenChainRefused) && pushed.last().is_some_and(Entry::is_chained) {
            outcome.steps.push(Step::default());
            continue;
        }
        chains.extend(pushed.split_inclusive(|entry| !entry.is_chained()).map(<[Entry]>::to_vec));
        let taken = model.submit(&pushed);
        model.settle();
        outcome.steps.push(Step { taken, done: std::mem::take(&mut model.posted) });
        if taken < pushed.len() {
            break;
        }
        pushed.clear();
    }
    Prediction { outcome, chains, parallel: model.parallel, never_drained: model.never_drained }
}

/// Timers later than this do not fire.
const HORIZON: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
struct Request {
    entry: Entry,
    /// Its place among all that were submitted.
    id: u64,
    /// A drain before it; only read of a chain's head.
    drain: bool,
    /// The kernel hands it to a worker.
    slow: bool,
    skip: bool,
    /// It failed with `CQE_SKIP_SUCCESS`: its followers post nothing.
    hides_followers: bool,
    failed: bool,
    /// It ends when its turn comes.
    cancelled: bool,
    res: i32,
    /// A LinkTimeout follows, and guards it.
    guarded: bool,
    guard_due: Option<Duration>,
    /// Of a multishot Timeout; 0 for ever.
    ticks: u32,
    /// Of a Timeout with a count: completions until it ends.
    count: Option<u32>,
}

impl Request {
    fn new(entry: Entry, id: u64) -> Request {
        let repeat = match entry.op {
            Op::Timeout { repeat, .. } => repeat,
            _ => Repeat::Once,
        };
        Request {
            entry,
            id,
            drain: false,
            slow: entry.flags.contains(Flags::ASYNC),
            skip: entry.flags.contains(Flags::SKIP),
            hides_followers: false,
            failed: false,
            cancelled: false,
            res: 0,
            guarded: false,
            guard_due: None,
            ticks: if let Repeat::Multishot(ticks) = repeat { ticks } else { 0 },
            count: if let Repeat::Count(count) = repeat { Some(count) } else { None },
        }
    }

    fn fail(&mut self, res: i32) {
        self.failed = true;
        self.res = res;
        if self.skip {
            self.skip = false;
            self.hides_followers = true;
        }
    }

    fn is_hard(&self) -> bool {
        self.entry.flags.contains(Flags::HARDLINK)
    }

    fn has_drain(&self) -> bool {
        self.entry.flags.contains(Flags::DRAIN)
    }

    fn is_link_timeout(&self) -> bool {
        matches!(self.entry.op, Op::LinkTimeout(_))
    }
}

/// What is left of a chain, in order. An entry alone is a chain of one.
type Chain = VecDeque<Request>;

/// A timeout that has started, and its followers.
#[derive(Debug)]
struct Armed {
    request: Request,
    rest: Chain,
    due: Duration,
}

/// What is to be done once the present step is over.
#[derive(Debug)]
enum Task {
    Start(Chain),
    /// These end without having started.
    Abandon(Chain),
    End(Request, Chain),
    /// A Timeout's time has come.
    Fire(Request, Chain),
    /// The LinkTimeout that guards this request has come.
    FireGuard(u64),
}

impl Task {
    /// The requests in it whose turn has not come.
    fn waiting(&mut self) -> Option<&mut Chain> {
        match self {
            Task::Start(chain) | Task::Abandon(chain) | Task::End(_, chain) | Task::Fire(_, chain) => Some(chain),
            Task::FireGuard(_) => None,
        }
    }
}

#[derive(Debug)]
struct Model {
    rules: Rules,
    /// Requests submitted and not ended.
    live: usize,
    /// Those of them that a drain holds.
    held: usize,
    held_chains: VecDeque<Chain>,
    drain_active: bool,
    /// A drain was let go, and has not ended.
    drain_running: bool,
    /// A skip was seen: the kernel drains no more.
    drains_refused: bool,
    /// The next chain waits for the present one, which has a drain inside.
    drain_next: bool,
    /// The chain whose members are being submitted.
    open: Option<Chain>,
    ended: Vec<(Request, Chain)>,
    /// Followers of the Cancel that runs.
    own_rest: Chain,
    tasks: VecDeque<Task>,
    armed: Vec<Armed>,
    now: Duration,
    submitted: u64,
    parallel: bool,
    never_drained: Vec<u64>,
    posted: Vec<Done>,
}

impl Model {
    fn new(rules: Rules) -> Model {
        Model {
            rules,
            live: 0,
            held: 0,
            held_chains: VecDeque::new(),
            drain_active: false,
            drain_running: false,
            drains_refused: false,
            drain_next: false,
            open: None,
            ended: Vec::new(),
            own_rest: Chain::new(),
            tasks: VecDeque::new(),
            armed: Vec::new(),
            now: Duration::ZERO,
            submitted: 0,
            parallel: false,
            never_drained: Vec::new(),
            posted: Vec::new(),
        }
    }

    /// Returns how many entries were taken.
    fn submit(&mut self, entries: &[Entry]) -> usize {
        let mut taken = 0;
        for entry in entries {
            taken += 1;
            if !self.submit_one(*entry) && !self.rules.deviate(Deviation::SubmitAll) {
                break;
            }
        }
        // A chain ends with its submit.
        if let Some(chain) = self.open.take() {
            self.queue(chain);
        }
        self.flush();
        taken
    }

    /// False for a bad entry at the end of its chain.
    fn submit_one(&mut self, entry: Entry) -> bool {
        self.live += 1;
        self.submitted += 1;
        let mut request = Request::new(entry, self.submitted);
        if self.bypasses_drains(&entry) {
            self.start(request, Chain::new());
            return true;
        }
        let prepared = self.prepare(&mut request);
        if let Err(errno) = prepared {
            request.fail(errno);
            self.never_drained.push(entry.user_data);
            if let Some(chain) = &mut self.open
                && !chain[0].failed
                && !self.rules.has(Fault::BadMemberSparesItsHead)
            {
                chain[0].fail(ECANCELED);
            }
        }
        self.open.get_or_insert_default().push_back(request);
        if entry.is_chained() {
            return true;
        }
        let mut chain = self.open.take().unwrap_or_default();
        if self.rules.deviate(Deviation::BadDrainHoldsNothing) && !chain[0].failed {
            self.drain_for_all(&mut chain);
        }
        if chain[0].slow || chain[0].failed {
            self.queue(chain);
        } else if let Some(head) = chain.pop_front() {
            self.start(head, chain);
        }
        prepared.is_ok()
    }

    fn bypasses_drains(&self, entry: &Entry) -> bool {
        self.rules.deviate(Deviation::CancelBypassesDrain)
            && matches!(entry.op, Op::Cancel(_) | Op::TimeoutRemove(_))
            && self.open.is_none()
            && !entry.flags.intersects(Flags::CHAINED | Flags::DRAIN)
    }

    fn prepare(&mut self, request: &mut Request) -> Result<(), i32> {
        if !self.rules.deviate(Deviation::DrainWithSkip) {
            self.drains_refused |= request.skip;
            if request.has_drain() && self.drains_refused && !self.rules.has(Fault::DrainAfterSkipRuns) {
                return Err(EOPNOTSUPP);
            }
        }
        if !self.rules.deviate(Deviation::BadDrainHoldsNothing) {
            self.drain_for(request);
        }
        match request.entry.op {
            Op::Bad => Err(EINVAL),
            Op::LinkTimeout(_) => match self.open.as_mut().and_then(|chain| chain.back_mut()) {
                Some(before) if !before.is_link_timeout() || self.rules.has(Fault::LinkTimeoutsInARow) => {
                    before.guarded = true;
                    Ok(())
                }
                _ => Err(EINVAL),
            },
            _ => Ok(()),
        }
    }

    /// What a request and the ones before it mean for drains, as the kernel has it.
    fn drain_for(&mut self, request: &mut Request) {
        if request.has_drain() {
            self.drain_active = !self.rules.has(Fault::DrainIgnored);
            let head = match &mut self.open {
                Some(chain) => {
                    self.drain_next = true;
                    &mut chain[0]
                }
                None => &mut *request,
            };
            head.drain = true;
            head.slow = true;
        }
        request.slow |= self.drain_active;
        if self.open.is_none() && std::mem::take(&mut self.drain_next) {
            self.drain_active = true;
            request.drain = true;
            request.slow = true;
        }
    }

    /// The same for a chain as a whole.
    fn drain_for_all(&mut self, chain: &mut Chain) {
        let drain = chain.iter().any(Request::has_drain) || self.drain_next;
        self.drain_next = chain.iter().skip(1).any(Request::has_drain);
        self.drain_active |= drain && !self.rules.has(Fault::DrainIgnored);
        chain[0].drain = drain;
        chain[0].slow |= self.drain_active;
    }

    /// A chain that does not start at once: it has failed, or a drain is about, or the kernel leaves it to a worker.
    fn queue(&mut self, mut chain: Chain) {
        if chain[0].failed {
            if let Some(mut head) = chain.pop_front() {
                // Hard links do not help against a failed preparation.
                if !self.rules.has(Fault::HardlinkSurvivesBadMember) {
                    head.entry.flags.remove(Flags::HARDLINK);
                }
                self.end_with_rest(head, chain);
            }
        } else if self.drain_active {
            self.parallel = true;
            let drain = chain[0].drain;
            self.held += chain.len();
            self.held_chains.push_back(chain);
            self.release_held();
            if !drain && self.held_chains.is_empty() {
                self.drain_active = false;
            }
        } else {
            self.parallel = true;
            self.tasks.push_back(Task::Start(chain));
        }
    }

    /// Lets go what no drain holds any more.
    fn release_held(&mut self) {
        let mut first = true;
        while let Some(chain) = self.held_chains.front() {
            let idle = self.live == self.held;
            let drain = chain[0].drain && !self.rules.has(Fault::LaterDoNotWaitForDrain);
            self.drain_running &= !idle;
            let waits = if self.rules.deviate(Deviation::DrainEndsWithItself) {
                drain || self.drain_running
            } else {
                drain || self.drain_running || first
            };
            if waits && !idle {
                return;
            }
            self.drain_running |= drain;
            if let Some(mut chain) = self.held_chains.pop_front() {
                self.held -= chain.len();
                if let Some(head) = chain.pop_front() {
                    self.start(head, chain);
                }
            }
            first = false;
        }
        if self.rules.deviate(Deviation::DrainEndsWithItself) {
            self.drain_active = self.drain_running;
        }
    }

    fn start(&mut self, mut request: Request, rest: Chain) {
        self.parallel |= request.slow;
        if request.cancelled {
            request.fail(ECANCELED);
            self.end(request, rest);
            return;
        }
        match request.entry.op {
            Op::Nop(res) => {
                request.res = res;
                if res < 0 || res > 0 && self.rules.has(Fault::PositiveResultFails) {
                    request.fail(res);
                }
                self.end(request, rest);
            }
            Op::Timeout { after, .. } => {
                let due = self.now + after;
                if request.guarded
                    && let Some(Op::LinkTimeout(after)) = rest.front().map(|guard| guard.entry.op)
                {
                    request.guard_due = Some(self.now + after);
                }
                self.armed.push(Armed { request, rest, due });
            }
            Op::Cancel(target) => {
                let all = !matches!(target, Target::One(_));
                // Its own followers can be cancelled too.
                self.own_rest = rest;
                let cancelled = self.cancel(target, self.rules.deviate(Deviation::CancelQueued));
                let rest = std::mem::take(&mut self.own_rest);
                let not_found = !all || self.rules.has(Fault::EmptyCancelAllNotFound);
                match cancelled {
                    0 if not_found => request.fail(ENOENT),
                    count if all => request.res = count,
                    _ => {}
                }
                self.end(request, rest);
            }
            Op::TimeoutRemove(target) => {
                if self.cancel(Target::One(target), false) == 0 {
                    request.fail(ENOENT);
                }
                self.end(request, rest);
            }
            // Only a planted fault starts these.
            Op::Bad | Op::LinkTimeout(_) => self.end(request, rest),
        }
    }

    /// Cancels what has started, and what waits if asked to, oldest first. Returns how many.
    fn cancel(&mut self, target: Target, queued: bool) -> i32 {
        let meant = |request: &Request| {
            target.matches(request.entry.user_data) && !request.cancelled && !request.is_link_timeout()
        };
        let mut found: Vec<u64> =
            self.armed.iter().filter(|armed| meant(&armed.request)).map(|armed| armed.request.id).collect();
        if queued {
            found.extend(self.waiting().filter(|request| meant(request)).map(|request| request.id));
            found.sort_unstable();
        }
        if matches!(target, Target::One(_)) || self.rules.has(Fault::CancelEndsOnlyOne) {
            found.truncate(1);
        }
        for &id in &found {
            if let Some(at) = self.armed.iter().position(|armed| armed.request.id == id) {
                self.cancel_armed(at);
            } else if let Some(at) = self.held_chains.iter().position(|chain| chain[0].id == id) {
                self.cancel_held(at);
            } else if let Some(request) = self.waiting().find(|request| request.id == id) {
                request.cancelled = true;
            }
        }
        found.len() as i32
    }

    /// Every request whose turn has not come.
    fn waiting(&mut self) -> impl Iterator<Item = &mut Request> {
        let armed = self.armed.iter_mut().map(|armed| &mut armed.rest);
        let ended = self.ended.iter_mut().map(|(_, rest)| rest);
        let tasks = self.tasks.iter_mut().filter_map(Task::waiting);
        armed.chain(&mut self.held_chains).chain(ended).chain(tasks).chain([&mut self.own_rest]).flatten()
    }

    fn cancel_armed(&mut self, at: usize) {
        let Armed { mut request, rest, .. } = self.armed.remove(at);
        request.fail(ECANCELED);
        self.end_soon(request, rest);
    }

    /// Cancels the head of a chain that a drain holds, which ends with all that fails behind it. What a hard link lets start
    /// stays behind the drain, unless it was cancelled before.
    fn cancel_held(&mut self, at: usize) {
        let mut rest = std::mem::take(&mut self.held_chains[at]);
        self.held -= rest.len();
        let Some(mut head) = rest.pop_front() else { return };
        let mut still_held = Chain::new();
        if head.is_hard() {
            still_held = rest.split_off(if head.guarded { 1 } else { 0 });
        }
        let mut next_too = false;
        match still_held.front_mut() {
            Some(next) => {
                next.drain = head.drain;
                next.slow = head.slow;
                next_too = next.cancelled;
                self.held += still_held.len();
                self.held_chains[at] = still_held;
            }
            None => drop(self.held_chains.remove(at)),
        }
        head.fail(ECANCELED);
        self.never_drained.push(head.entry.user_data);
        self.end_with_rest(head, rest);
        if next_too {
            self.cancel_held(at);
        }
    }

    /// Ends a request and what fails behind it.
    fn end_with_rest(&mut self, request: Request, rest: Chain) {
        let before = self.tasks.len();
        self.end(request, rest);
        for task in self.tasks.split_off(before) {
            self.run(task);
        }
    }

    /// The kernel ends it a little later.
    fn end_soon(&mut self, request: Request, rest: Chain) {
        if self.rules.prompt {
            self.end(request, rest);
        } else {
            self.tasks.push_back(Task::End(request, rest));
        }
    }

    /// Its result is known.
    fn end(&mut self, request: Request, rest: Chain) {
        self.ended.push((request, rest));
        if self.rules.prompt {
            self.post_ended();
        }
    }

    fn flush(&mut self) {
        self.post_ended();
        if self.drain_active {
            self.release_held();
        }
    }

    fn post_ended(&mut self) {
        let ended = std::mem::take(&mut self.ended);
        for (request, _) in &ended {
            if !request.skip {
                self.post(request, false);
            }
        }
        for (request, rest) in ended {
            self.live -= 1;
            self.follow(request, rest);
        }
    }

    fn post(&mut self, request: &Request, more: bool) {
        self.posted.push(Done { user_data: request.entry.user_data, res: request.res, more });
        if matches!(request.entry.op, Op::Timeout { .. }) {
            return;
        }
        for armed in &mut self.armed {
            if let Some(count) = &mut armed.request.count {
                *count = count.saturating_sub(1);
            }
        }
        while let Some(at) = self.armed.iter().position(|armed| armed.request.count == Some(0)) {
            let Armed { request, rest, .. } = self.armed.remove(at);
            self.tasks.push_back(Task::End(request, rest));
        }
    }

    /// What follows a request that has ended.
    fn follow(&mut self, request: Request, mut rest: Chain) {
        if request.guarded
            && let Some(mut guard) = rest.pop_front_if(|next| next.is_link_timeout())
        {
            guard.res = ECANCELED;
            guard.skip &= !self.rules.has(Fault::SkippedLinkTimeoutPosts);
            self.end_soon(guard, Chain::new());
            if self.rules.has(Fault::LinkTimeoutTakesFollower) {
                self.tasks.push_back(Task::Abandon(std::mem::take(&mut rest)));
            }
        }
        if rest.is_empty() {
            return;
        }
        let protects =
            request.is_hard() && !(request.res == ECANCELED && self.rules.has(Fault::HardlinkBreaksOnCancel));
        if !request.failed || protects {
            self.tasks.push_back(Task::Start(rest));
            return;
        }
        for follower in &mut rest {
            let own_errno = follower.failed && self.rules.deviate(Deviation::RealErrnoUnderSkip);
            follower.skip = if self.rules.has(Fault::SkipOfFollowersKept) {
                follower.skip || request.hides_followers
            } else {
                request.hides_followers && !own_errno && !self.rules.has(Fault::SkipHidesNoFollower)
            };
        }
        self.tasks.push_back(Task::Abandon(rest));
    }

    fn run_tasks(&mut self) {
        while !self.tasks.is_empty() || !self.ended.is_empty() {
            while let Some(task) = self.tasks.pop_front() {
                self.run(task);
            }
            self.flush();
        }
    }

    fn run(&mut self, task: Task) {
        match task {
            Task::Start(mut chain) => {
                if let Some(head) = chain.pop_front() {
                    self.start(head, chain);
                }
            }
            Task::Abandon(chain) => {
                for mut request in chain {
                    if !request.failed {
                        request.res = ECANCELED;
                    }
                    self.end(request, Chain::new());
                }
            }
            Task::End(request, rest) => self.end(request, rest),
            Task::Fire(request, rest) => self.fire(request, rest),
            Task::FireGuard(id) => self.fire_guard(id),
        }
    }

    fn fire(&mut self, mut request: Request, rest: Chain) {
        let Op::Timeout { after, repeat, etime_success } = request.entry.op else {
            unreachable!("{} is no Timeout", request.entry)
        };
        request.res = ETIME;
        if !etime_success || self.rules.has(Fault::EtimeSuccessIgnored) {
            request.fail(ETIME);
        }
        let again = match repeat {
            Repeat::Multishot(0) => true,
            Repeat::Multishot(_) => {
                request.ticks -= 1;
                request.ticks > 0 && !self.rules.has(Fault::MultishotTicksOnce)
            }
            Repeat::Once | Repeat::Count(_) => false,
        };
        if !again {
            self.end(request, rest);
            return;
        }
        self.flush();
        self.post(&request, true);
        // For ever: one tick stands for as many as come before the submit has settled.
        let due = if request.ticks == 0 { Duration::MAX } else { self.now + after };
        self.armed.push(Armed { request, rest, due });
    }

    /// A LinkTimeout's time has come: it ends first, then the entry that it guards, as by a Cancel.
    fn fire_guard(&mut self, id: u64) {
        let at = self.armed.iter().position(|armed| armed.request.id == id).expect("its guard was armed with it");
        let guarded = &mut self.armed[at];
        guarded.request.guarded = false;
        let user_data = guarded.request.entry.user_data;
        let mut guard = guarded.rest.pop_front().expect("it is guarded");
        guard.res = ETIME;
        let first = self.armed.iter().position(|armed| armed.request.entry.user_data == user_data);
        self.end(guard, Chain::new());
        self.cancel_armed(if self.rules.deviate(Deviation::LinkTimeoutKey) { at } else { first.unwrap_or(at) });
    }

    /// Runs until only timers beyond the horizon are left.
    fn settle(&mut self) {
        self.run_tasks();
        loop {
            let horizon = self.now + HORIZON;
            let first = |dues: &mut dyn Iterator<Item = Duration>| {
                let dues = dues.filter(|due| *due <= horizon);
                if self.rules.clock_backwards { dues.max() } else { dues.min() }
            };
            let guards = first(&mut self.armed.iter().filter_map(|armed| armed.request.guard_due));
            let timers = first(&mut self.armed.iter().map(|armed| armed.due));
            let Some(next) = first(&mut guards.into_iter().chain(timers)) else { break };
            self.now = self.now.max(next);
            if guards == Some(next) && !(self.rules.clock_backwards && timers == guards) {
                let due = self.armed.iter_mut().find(|armed| armed.request.guard_due == Some(next));
                if let Some(Armed { request, .. }) = due {
                    request.guard_due = None;
                    let id = request.id;
                    self.tasks.push_back(Task::FireGuard(id));
                }
            } else if let Some(at) = self.armed.iter().position(|armed| armed.due == next) {
                let Armed { request, rest, .. } = self.armed.remove(at);
                self.tasks.push_back(Task::Fire(request, rest));
            }
            self.run_tasks();
        }
    }
}
