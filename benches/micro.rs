//! Single calls by themselves, with criterion. `cargo xtask bench micro` puts their medians into its table, each as `micro_` and
//! its name here.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use moonring::{Engine, Region, Ring, fence, opcode};

const ENTRIES: u32 = 1024;

/// Splits `iterations` into runs that the ring has room for, and sums the times that they tell.
fn in_runs(iterations: u64, mut run: impl FnMut(u64) -> Duration) -> Duration {
    let mut left = iterations;
    let mut time = Duration::ZERO;
    while left > 0 {
        let count = left.min(u64::from(ENTRIES));
        time += run(count);
        left -= count;
    }
    time
}

fn drain(ring: &mut Ring, count: u64) {
    ring.submit().unwrap();
    ring.wait(count as usize).unwrap();
    assert_eq!(ring.completion().count() as u64, count);
}

fn parts(criterion: &mut Criterion) {
    let engine = Engine::loopback();
    let mut ring = Ring::builder().build(ENTRIES, &engine).unwrap();
    criterion.bench_function("push_nop", |bencher| {
        bencher.iter_custom(|iterations| {
            in_runs(iterations, |count| {
                let start = Instant::now();
                let mut queue = ring.submission();
                for n in 0..count {
                    queue.push(black_box(opcode::Nop::new().build().user_data(n))).unwrap();
                }
                let time = start.elapsed();
                drain(&mut ring, count);
                time
            })
        });
    });
    let region = engine.register(Region::alloc(4096).unwrap()).unwrap();
    let peer = engine.open_segment(engine.name(), Duration::from_secs(10)).unwrap();
    criterion.bench_function("push_read", |bencher| {
        bencher.iter_custom(|iterations| {
            in_runs(iterations, |count| {
                let start = Instant::now();
                let mut queue = ring.submission();
                for n in 0..count {
                    let remote = peer.at(region.address() + 2048);
                    let read = opcode::Read::new(region.slice(0..64).unwrap(), remote);
                    queue.push(black_box(read.build().user_data(n))).unwrap();
                }
                let time = start.elapsed();
                drain(&mut ring, count);
                time
            })
        });
    });
    criterion.bench_function("reap", |bencher| {
        bencher.iter_custom(|iterations| {
            in_runs(iterations, |count| {
                for n in 0..count {
                    ring.submission().push(opcode::Nop::new().build().user_data(n)).unwrap();
                }
                ring.submit().unwrap();
                ring.wait(count as usize).unwrap();
                let start = Instant::now();
                let reaped = ring.completion().map(black_box).count();
                let time = start.elapsed();
                assert_eq!(reaped as u64, count);
                time
            })
        });
    });
    criterion.bench_function("signal_host_fence", |bencher| {
        bencher.iter_custom(|iterations| {
            in_runs(iterations, |count| {
                let (signallers, fences): (Vec<_>, Vec<_>) = (0..count).map(|_| fence::host()).unzip();
                for fence in &fences {
                    ring.submission().push(opcode::Wait::new().build().wait(fence)).unwrap();
                }
                ring.submit().unwrap();
                // Time to come to the gate.
                std::thread::sleep(Duration::from_millis(1));
                let start = Instant::now();
                for signaller in signallers {
                    signaller.signal();
                }
                let time = start.elapsed();
                ring.wait(count as usize).unwrap();
                assert_eq!(ring.completion().count() as u64, count);
                time
            })
        });
    });
    criterion.bench_function("make_host_fence", |bencher| bencher.iter(|| black_box(fence::host())));
}

criterion_group!(micro, parts);
criterion_main!(micro);
