//! The same job done with bare queues: entries of 64 bytes one way, results of 16 bytes the other, a thread between them.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{JoinHandle, yield_now};
use std::time::Instant;

use crossbeam_queue::ArrayQueue;
use tokio::sync::{mpsc, oneshot};

use crate::nop::{IN_FLIGHT, Pair};

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Entry([u64; 8]);

impl Entry {
    fn new(user_data: u64) -> Entry {
        Entry([user_data, 1, 2, 3, 4, 5, 6, 7])
    }

    fn result(self) -> [u64; 2] {
        [self.0[0], 0]
    }
}

type Result = [u64; 2];

/// A thread that runs until it is told to stop.
struct Between {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Between {
    fn new(run: impl FnOnce(&AtomicBool) + Send + 'static) -> Between {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Between { stop, thread: Some(std::thread::spawn(move || run(&stopped))) }
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

pub struct ArrayQueues {
    entries: Arc<ArrayQueue<Entry>>,
    results: Arc<ArrayQueue<Result>>,
    _between: Between,
}

impl ArrayQueues {
    pub fn new() -> Option<ArrayQueues> {
        let entries = Arc::new(ArrayQueue::<Entry>::new(IN_FLIGHT as usize));
        let results = Arc::new(ArrayQueue::<Result>::new(IN_FLIGHT as usize));
        let (ins, outs) = (Arc::clone(&entries), Arc::clone(&results));
        let between = Between::new(move |stop| {
            while !stop.load(Relaxed) {
                while let Some(entry) = ins.pop() {
                    let mut result = entry.result();
                    while let Err(again) = outs.push(result) {
                        result = again;
                        spin_loop();
                    }
                }
                spin_loop();
            }
        });
        Some(ArrayQueues { entries, results, _between: between })
    }
}

impl Pair for ArrayQueues {
    fn push(&mut self, first: u64, count: u64) {
        for user_data in first..first + count {
            assert!(self.entries.push(Entry::new(user_data)).is_ok());
        }
    }

    fn reap(&mut self, next: u64) -> u64 {
        let mut reaped = 0;
        while let Some(result) = self.results.pop() {
            assert_eq!(result[0], next + reaped);
            reaped += 1;
        }
        reaped
    }
}

/// Four threads that push one by one into one queue, in million operations in a second. They share a core with the reaper,
/// so whoever can do nothing yields.
pub fn four_into_an_array_queue(operations: u64) -> f64 {
    let ArrayQueues { entries, results, _between } = crate::machine::on_poller_core(ArrayQueues::new).unwrap();
    let each = operations / 4;
    let mut sum = 0;
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for pushed in 0..each {
                    while entries.push(Entry::new(pushed)).is_err() {
                        yield_now();
                    }
                }
            });
        }
        let mut reaped = 0;
        while reaped < 4 * each {
            let before = reaped;
            while let Some(result) = results.pop() {
                sum += result[0];
                reaped += 1;
            }
            if reaped == before {
                yield_now();
            }
        }
    });
    let time = start.elapsed();
    assert_eq!(sum, 4 * (each * (each - 1) / 2));
    4.0 * each as f64 * 1e3 / time.as_nanos() as f64
}

pub struct Rtrb {
    entries: rtrb::Producer<Entry>,
    results: rtrb::Consumer<Result>,
    _between: Between,
}

impl Rtrb {
    pub fn new() -> Option<Rtrb> {
        // Twice the room: places are given back after the results are there.
        let (entries, mut ins) = rtrb::RingBuffer::<Entry>::new(2 * IN_FLIGHT as usize);
        let (mut outs, results) = rtrb::RingBuffer::<Result>::new(IN_FLIGHT as usize);
        let between = Between::new(move |stop| {
            while !stop.load(Relaxed) {
                let count = ins.slots().min(outs.slots());
                if count == 0 {
                    spin_loop();
                    continue;
                }
                let entries = ins.read_chunk(count).unwrap().into_iter();
                outs.write_chunk_uninit(count).unwrap().fill_from_iter(entries.map(Entry::result));
            }
        });
        Some(Rtrb { entries, results, _between: between })
    }
}

impl Pair for Rtrb {
    fn push(&mut self, first: u64, count: u64) {
        let chunk = self.entries.write_chunk_uninit(count as usize).unwrap();
        chunk.fill_from_iter((first..first + count).map(Entry::new));
    }

    fn reap(&mut self, next: u64) -> u64 {
        let mut reaped = 0;
        for result in self.results.read_chunk(self.results.slots()).unwrap() {
            assert_eq!(result[0], next + reaped);
            reaped += 1;
        }
        reaped
    }
}

/// A task that is sent entries with a oneshot each, on a runtime of its own thread.
pub struct Tokio {
    entries: Option<mpsc::Sender<(Entry, oneshot::Sender<Result>)>>,
    outstanding: VecDeque<oneshot::Receiver<Result>>,
    thread: Option<JoinHandle<()>>,
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().unwrap()
}

impl Tokio {
    pub fn new() -> Option<Tokio> {
        let (entries, mut ins) = mpsc::channel::<(Entry, oneshot::Sender<Result>)>(IN_FLIGHT as usize);
        let thread = std::thread::spawn(move || {
            runtime().block_on(async {
                while let Some((entry, result)) = ins.recv().await {
                    result.send(entry.result()).unwrap();
                }
            });
        });
        Some(Tokio { entries: Some(entries), outstanding: VecDeque::new(), thread: Some(thread) })
    }
}

impl Pair for Tokio {
    fn push(&mut self, first: u64, count: u64) {
        for user_data in first..first + count {
            let (result, receiver) = oneshot::channel();
            let sent = self.entries.as_ref().unwrap().try_send((Entry::new(user_data), result));
            assert!(sent.is_ok());
            self.outstanding.push_back(receiver);
        }
    }

    fn reap(&mut self, next: u64) -> u64 {
        let mut reaped = 0;
        while let Some(receiver) = self.outstanding.front_mut()
            && let Ok(result) = receiver.try_recv()
        {
            assert_eq!(result[0], next + reaped);
            self.outstanding.pop_front();
            reaped += 1;
        }
        reaped
    }
}

impl Drop for Tokio {
    fn drop(&mut self) {
        self.entries = None;
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}
