//! Futures of single entries: tasks that poll, cancel, drop and detach them, and the pages that they keep.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::book::{Book, Desk, Mark, lock};
use super::program::Ask;
use super::record::{FutureBook, Page, Seen};
use super::world::{Bell, World};
use crate::cqe::{Cqe, CqeFlags};
use crate::fence::Fence;
use crate::ring::future::{EntryFuture, LAST, RESULT};

/// What a future keeps: the book hears when it is let go of.
#[derive(Debug)]
pub(super) struct Kept {
    uid: usize,
    book: Desk,
}

impl Drop for Kept {
    fn drop(&mut self) {
        lock(&self.book).let_go(self.uid);
    }
}

/// An entry's future, and what the book has heard of it.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) uid: usize,
    ring: usize,
    /// Until it is ready, dropped or detached.
    future: Option<EntryFuture<Kept>>,
    /// Has the entry's route.
    fence: Fence,
    /// The book has the result.
    has_result: bool,
    /// The book has its last word.
    over: bool,
    /// Of the task that polled it last, and whether that knew the result.
    waits: Option<(Arc<Bell>, bool)>,
}

impl Live {
    fn has_news(&self) -> bool {
        let route = self.fence.0.route().expect("it is a future's");
        !self.over && route.has(if self.has_result { LAST } else { RESULT })
    }
}

impl World {
    /// Looks after the future of an entry that was just pushed; a fence on its end.
    pub(super) fn keep_future(&mut self, ring: usize, uid: usize, future: EntryFuture) -> Fence {
        let fence = future.fence();
        let future = future.keep(Kept { uid, book: Arc::clone(&self.book) });
        lock(&self.book).records[uid].future = Some(FutureBook::default());
        let (future, own) = (Some(future), fence.clone());
        self.futures.push(Live { uid, ring, future, fence: own, has_result: false, over: false, waits: None });
        fence
    }

    /// The owner of a future, counted from the youngest, does something with it.
    pub(super) fn ask(&mut self, which: u8, ask: Ask) {
        let there: Vec<_> = (0..self.futures.len()).filter(|&at| self.futures[at].future.is_some()).collect();
        if there.is_empty() {
            return;
        }
        let at = there[there.len() - 1 - which as usize % there.len()];
        // What was not submitted before its ring closed may have ended outside of any turn.
        self.hear(at);
        let Live { uid, ref future, .. } = self.futures[at];
        match ask {
            Ask::Poll => self.poll(at),
            Ask::Result => self.poll_result(at),
            Ask::Cancel => {
                lock(&self.book).disown(uid, false);
                future.iter().for_each(EntryFuture::cancel);
            }
            Ask::Drop => {
                lock(&self.book).disown(uid, true);
                (self.futures[at].future, self.futures[at].waits) = (None, None);
            }
            Ask::Detach => {
                lock(&self.book).detach(uid);
                self.futures[at].waits = None;
                self.futures[at].future.take().into_iter().for_each(EntryFuture::detach);
            }
        }
    }

    fn poll(&mut self, at: usize) {
        let Some(mut future) = self.futures[at].future.take() else { return };
        let (uid, bell) = (self.futures[at].uid, Arc::<Bell>::default());
        let waker = Waker::from(Arc::clone(&bell));
        match Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => {
                let Live { over, has_result, .. } = self.futures[at];
                (self.futures[at].future, self.futures[at].waits) = (Some(future), Some((bell, has_result)));
                if over {
                    self.violate(format!("the future of entry {uid} is pending, and the entry is over"));
                }
            }
            Poll::Ready(ended) => {
                let (completion, notif) = (Seen::of(&ended.completion, 0), ended.notif.map(|cqe| Seen::of(&cqe, 0)));
                lock(&self.book).future_ended(uid, completion, notif, ended.buffer.is_some());
                self.futures[at].waits = None;
            }
        }
    }

    fn poll_result(&mut self, at: usize) {
        let Live { uid, has_result, .. } = self.futures[at];
        let Some(future) = &mut self.futures[at].future else { return };
        let bell = Arc::<Bell>::default();
        let waker = Waker::from(Arc::clone(&bell));
        let polled = pin!(future.result()).poll(&mut Context::from_waker(&waker));
        match polled {
            Poll::Pending => {
                self.futures[at].waits = Some((bell, has_result));
                if has_result {
                    self.violate(format!("the result of entry {uid} is pending, and it is known"));
                }
            }
            Poll::Ready(cqe) => {
                let mut book = lock(&self.book);
                let known = book.records[uid].result;
                if !known.is_some_and(|known| known.is(&Seen::of(&cqe, 0))) {
                    book.violate(format!("the future of entry {uid} has the result {cqe:?}, told was {known:?}"));
                }
            }
        }
    }

    /// A ring's futures that the book has not heard all of.
    pub(super) fn news_of(&self, ring: usize) -> Vec<usize> {
        let news = |&at: &usize| self.futures[at].ring == ring && self.futures[at].has_news();
        (0..self.futures.len()).filter(news).collect()
    }

    /// The book hears what a future has been told.
    pub(super) fn hear(&mut self, at: usize) {
        while self.futures[at].has_news() {
            let live = &mut self.futures[at];
            let route = live.fence.0.route().expect("it is a future's");
            let Some(cqe) = (if live.has_result { route.notif() } else { Some(route.result()) }) else {
                let uid = live.uid;
                live.over = true;
                self.violate(format!("the future of entry {uid} was told the end, and no NOTIF"));
                return;
            };
            live.has_result = true;
            live.over = !cqe.flags().contains(CqeFlags::MORE);
            lock(&self.book).observe_future(live.uid, &cqe);
        }
    }

    /// The same for those before an entry in its chain, of which it is known that they came first, and older ones.
    pub(super) fn hear_chain(&mut self, news: &[usize], ring: usize, cqe: &Cqe) {
        let book = lock(&self.book);
        let Some(uid) = book.entry_of(ring, cqe) else { return };
        let before = |&at: &usize| book.records[at].before;
        let chain: Vec<usize> = std::iter::successors(Some(uid), before).skip(1).collect();
        drop(book);
        let last = news.iter().rposition(|&future| chain.contains(&self.futures[future].uid));
        news[..last.map_or(0, |last| last + 1)].iter().for_each(|&future| self.hear(future));
    }

    /// Tasks are woken, and what nobody waits for is let go of.
    pub(super) fn check_futures(&mut self) {
        let mut book = lock(&self.book);
        for live in &mut self.futures {
            let uid = live.uid;
            if let Some((bell, knew)) = &live.waits
                && (live.over || (live.has_result && !knew))
            {
                if !bell.has_rung() {
                    book.violate(format!("the future of entry {uid} has news, and its task was not woken"));
                }
                live.waits = None;
            }
            if live.over {
                book.check_page(uid, live.future.is_none());
            }
        }
    }

    /// All rings are closed: every future that there still is is ready.
    pub(super) fn end_futures(&mut self) {
        for at in 0..self.futures.len() {
            self.hear(at);
            self.poll(at);
            if !self.futures[at].over {
                let uid = self.futures[at].uid;
                self.violate(format!("all rings are closed, and the future of entry {uid} was not told"));
            }
        }
        self.check_futures();
    }
}

impl Book {
    /// An entry's page is dropped.
    fn let_go(&mut self, uid: usize) {
        let record = &mut self.records[uid];
        let touching = record.touching;
        let Some(future) = &mut record.future else { return };
        let before = std::mem::replace(&mut future.page, Page::Dropped);
        if before == Page::Dropped {
            self.violate(format!("the page of entry {uid} is dropped twice"));
        }
        if touching > 0 {
            self.violate(format!("the page of entry {uid} is dropped, and the transport touches it"));
        }
        self.say(|| format!("    the page of entry {uid} is dropped"));
    }

    /// A future is cancelled, or dropped.
    fn disown(&mut self, uid: usize, gone: bool) {
        let ring = self.records[uid].ring;
        if let Some(future) = &mut self.records[uid].future {
            (future.disowned, future.gone) = (true, gone);
        }
        self.cancels.push(super::book::CancelBook {
            ring,
            whom: Mark::Entry(uid),
            by: None,
            timeouts_only: false,
            future: true,
            over: None,
        });
    }

    fn detach(&mut self, uid: usize) {
        if let Some(future) = &mut self.records[uid].future {
            future.gone = true;
        }
    }

    /// A future is ready.
    fn future_ended(&mut self, uid: usize, completion: Seen, notif: Option<Seen>, gives_back: bool) {
        let record = &mut self.records[uid];
        let touching = record.touching;
        let (result, ended) = (record.result, record.ended);
        let Some(future) = &mut record.future else { return };
        let last = notif.unwrap_or(completion);
        let right = result.is_some_and(|result| result.is(&completion)) && ended.is_some_and(|ended| ended.is(&last));
        let keeps = last.flags.contains(CqeFlags::UNQUIET);
        future.gone = true;
        if gives_back {
            future.page = Page::GivenBack;
        }
        if !right {
            self.violate(format!(
                "the future of entry {uid} is ready with {completion:?}, {notif:?}, told were {result:?}, {ended:?}"
            ));
        }
        if gives_back && touching > 0 {
            self.violate(format!("the page of entry {uid} is given back, and the transport touches it"));
        }
        if gives_back == keeps {
            self.violate(format!("the page of entry {uid} is given back: {gives_back}, and its last word is {last:?}"));
        }
        self.say(|| format!("    the future of entry {uid} is ready"));
    }

    /// An entry is over whose future is there still, or `gone`.
    fn check_page(&mut self, uid: usize, gone: bool) {
        let record = &self.records[uid];
        let (Some(future), Some(last)) = (record.future, record.ended) else { return };
        let unquiet = last.flags.contains(CqeFlags::UNQUIET);
        // What was given back is dropped by whoever has it.
        let right = match future.page {
            Page::Kept => !gone || unquiet,
            Page::GivenBack => false,
            Page::Dropped => gone && !unquiet,
        };
        if !right {
            self.violate(format!(
                "entry {uid} ended with {last:?}, its future is gone: {gone}, its page: {:?}",
                future.page
            ));
        }
    }
}
