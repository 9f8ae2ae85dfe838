//! Mooncake's Store through the ring, and from Python as engines use it: a thread with a queue, which makes one call for each
//! thing that it takes out. Values of 64 KiB, 16 in flight, on one master. A process of its own has the memory that the values
//! are in, so both sides are equally far from it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use moonring::mooncake::LogLevel;
use moonring::{Cqe, Engine, Region, Registered, Ring, opcode, store};
use store_master::Master;

use crate::Settings;
use crate::machine::{self, median};
use crate::out::{self, Line};

const BYTES: usize = 64 << 10;
const IN_FLIGHT: usize = 16;
/// Values that are there to be loaded.
const KEYS: usize = 256;
/// Operations of a block.
const EACH: usize = 256;
/// Room for the values: those to be loaded, and those of a block.
const ROOM: u64 = 256 << 20;
/// How long the Store may take to begin and to end.
const LIMIT: Duration = Duration::from_secs(60);

const SCRIPT: &str = include_str!("store.py");
const PYTHON: &str = "Python, a thread and a queue";
/// Python's threads, by what the script calls them: the one that engines have, and one that asks for all that its queue has.
const THREADS: [&str; 2] = ["each", "batches"];

/// What a block has shown.
struct Block {
    /// Operations per second.
    rate: f64,
    /// Of each operation, from before it is pushed until its end is known.
    micros: Vec<f64>,
}

pub fn measure(settings: &mut Settings) {
    match Sides::start() {
        Ok(mut sides) => {
            sides.measure(settings);
            sides.stop();
        }
        Err(why) => out::note(&format!("Mooncake's Store was not measured: {why}")),
    }
}

/// Lends the Store memory until standard input ends.
pub fn serve(master: &str) {
    let engine = Engine::loopback();
    let client = client(&engine, master, ROOM).expect("a client");
    println!("ready");
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    client.close(LIMIT).expect("it ends");
}

fn client(engine: &Engine, master: &str, segment: u64) -> Result<store::Client, String> {
    let builder = store::builder("127.0.0.1", master).segment_bytes(segment).log_level(LogLevel::Fatal);
    builder.build(engine).map_err(|error| error.to_string())
}

struct Sides {
    ours: Ours,
    python: Result<Script, String>,
    // Dropped in this order.
    _memory: Script,
    _master: Master,
}

impl Sides {
    fn start() -> Result<Sides, String> {
        let wheel = Path::new(env!("CARGO_MANIFEST_DIR")).join(".mooncake/wheel");
        let master = Master::start(&wheel, &[]).map_err(|error| error.to_string())?;
        let address = master.address();
        let mut serve = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
        serve.args(["--serve-store", &address]);
        let memory = Script::start(serve, "ready")?;
        let ours = Ours::start(&address)?;
        let mut python = Command::new("python3.11");
        // The wheel that set-up fetches is for this Python.
        python
            .args(["-c", SCRIPT, &address, &KEYS.to_string(), &IN_FLIGHT.to_string()])
            .env("PYTHONPATH", wheel)
            .env("MC_LOG_LEVEL", "FATAL")
            // As in our own process: connections are kept.
            .env("MC_TCP_ENABLE_CONNECTION_POOL", "1");
        Ok(Sides { ours, python: Script::start(python, "client: ready"), _memory: memory, _master: master })
    }

    fn measure(&mut self, settings: &mut Settings) {
        if let Err(why) = &self.python {
            out::note(&format!("Mooncake's Store from Python was not measured: {why}"));
        }
        self.compare(settings, false, "store_get_ops", "store_get_p50");
        self.compare(settings, true, "store_mixed_ops", "store_mixed_p50");
    }

    /// Blocks of each side in turn.
    fn compare(&mut self, settings: &mut Settings, mixed: bool, ops: &str, p50: &str) {
        let mut ours = Blocks::default();
        let mut threads = [Blocks::default(), Blocks::default()];
        for round in 0..=settings.rounds(60, 15) {
            if round == 1 {
                // The first round warmed everything up.
                (ours, threads) = Default::default();
            }
            out::say("probe", serde_json::json!(machine::probe()));
            ours.add(self.ours.block(mixed));
            if let Ok(python) = &mut self.python {
                for (how, blocks) in THREADS.iter().zip(&mut threads) {
                    blocks.add(python.block(how, mixed));
                }
            }
        }
        let (rate, micros) = ours.medians();
        let [each, batches] = threads.map(|mut blocks| (!blocks.rates.is_empty()).then(|| blocks.medians()));
        let line = |id, value, unit, peer: Option<f64>, higher| {
            Line { id, state: "any", value: Some(value), unit, peer: peer.map(|peer| (PYTHON, peer)), higher }.say();
        };
        line(ops, rate, "1/s", each.map(|(rate, _)| rate), true);
        line(p50, micros, "us", each.map(|(_, micros)| micros), false);
        if let Some((their_rate, their_micros)) = batches {
            out::note(&format!(
                "a thread in Python that asks for all that its queue has makes {their_rate:.0} operations/s with a median of \
                 {their_micros:.0} us: {ops} is {:.2} times that, {p50} {:.2}",
                rate / their_rate,
                their_micros / micros
            ));
        }
    }

    /// A process that exits with a client of Mooncake's may crash.
    fn stop(self) {
        let Ours { ring, store, .. } = self.ours;
        drop(ring);
        store.close(LIMIT).expect("it ends");
    }
}

/// What the blocks of one side have shown.
#[derive(Default)]
struct Blocks {
    rates: Vec<f64>,
    micros: Vec<f64>,
}

impl Blocks {
    fn add(&mut self, mut block: Block) {
        self.rates.push(block.rate);
        self.micros.push(median(&mut block.micros));
    }

    fn medians(&mut self) -> (f64, f64) {
        (median(&mut self.rates), median(&mut self.micros))
    }
}

/// The ring's side.
struct Ours {
    ring: Ring,
    store: store::Client,
    pages: Registered,
    pushed: [Instant; IN_FLIGHT],
    blocks: usize,
}

impl Ours {
    /// A client, and the values to load.
    fn start(master: &str) -> Result<Ours, String> {
        let engine = Engine::loopback();
        let store = client(&engine, master, 0)?;
        let pages = engine.register(Region::alloc(IN_FLIGHT * BYTES).unwrap()).unwrap();
        store.register(&pages).map_err(|error| error.to_string())?;
        let ring = Ring::builder().build(2 * IN_FLIGHT as u32, &engine).unwrap();
        let mut ours = Ours { ring, store, pages, pushed: [Instant::now(); IN_FLIGHT], blocks: 0 };
        for key in 0..KEYS {
            ours.push(opcode::Put::new(&ours.store, format!("value/{key}"), ours.page(0)).build(), 0);
            ours.ring.submit_and_wait(1).unwrap();
            let put = ours.ring.completion().next().unwrap().result();
            put.map_err(|error| format!("storing a value: {error}"))?;
        }
        Ok(ours)
    }

    fn page(&self, page: usize) -> moonring::Slice {
        self.pages.slice(page * BYTES..(page + 1) * BYTES).unwrap()
    }

    fn push(&mut self, entry: moonring::Entry, page: usize) {
        self.pushed[page] = Instant::now();
        self.ring.submission().push(entry.user_data(page as u64)).unwrap();
    }

    /// The `number`th operation of a block, with a page.
    fn operation(&mut self, number: usize, page: usize, mixed: bool) {
        let entry = if mixed && number % 2 == 1 {
            opcode::Put::new(&self.store, self.made(number), self.page(page)).build()
        } else {
            opcode::Get::new(&self.store, format!("value/{}", number % KEYS), self.page(page)).build()
        };
        self.push(entry, page);
    }

    /// The key of a value that a block stores.
    fn made(&self, number: usize) -> String {
        format!("ring/{}/{number}", self.blocks)
    }

    fn block(&mut self, mixed: bool) -> Block {
        self.blocks += 1;
        let mut micros = Vec::with_capacity(EACH);
        let start = Instant::now();
        for number in 0..IN_FLIGHT {
            self.operation(number, number, mixed);
        }
        let mut next = IN_FLIGHT;
        let mut ends: Vec<Cqe> = Vec::with_capacity(IN_FLIGHT);
        while micros.len() < EACH {
            self.ring.submit_and_wait(1).unwrap();
            ends.extend(self.ring.completion());
            for cqe in ends.drain(..) {
                let page = cqe.user_data() as usize;
                micros.push(self.pushed[page].elapsed().as_secs_f64() * 1e6);
                assert_eq!(cqe.result(), Ok(BYTES as u32));
                if next < EACH {
                    self.operation(next, page, mixed);
                    next += 1;
                }
            }
        }
        let rate = EACH as f64 / start.elapsed().as_secs_f64();
        // Not part of what is measured: what was stored goes again.
        for number in (1..EACH).step_by(2).filter(|_| mixed) {
            let entry = opcode::Remove::new(&self.store, self.made(number)).build();
            self.push(entry, 0);
            self.ring.submit_and_wait(1).unwrap();
            assert_eq!(self.ring.completion().next().unwrap().result(), Ok(0));
        }
        Block { rate, micros }
    }
}

/// A child process that ends with its standard input, and is killed when dropped.
struct Script {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Script {
    /// Starts it and waits for the line that says that it is ready.
    fn start(mut command: Command, ready: &str) -> Result<Script, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|error| format!("{command:?} does not start: {error}"))?;
        let (commands, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut script = Script { child, commands, answers };
        match script.line(ready) {
            Some(_) => Ok(script),
            None => Err(format!("{:?} ended: {:?}", command.get_program(), script.child.wait())),
        }
    }

    /// What follows `start` on the next line that begins so: Mooncake prints too. `None` if there is none.
    fn line(&mut self, start: &str) -> Option<String> {
        let mut lines = self.answers.by_ref().lines().map_while(Result::ok);
        lines.find_map(|line| Some(line.strip_prefix(start)?.to_owned()))
    }

    fn block(&mut self, how: &str, mixed: bool) -> Block {
        let mixed = if mixed { "mixed" } else { "gets" };
        writeln!(self.commands, "{how} {mixed} {EACH}").expect("Python reads");
        let answer = self.line("client:").expect("Python answers");
        let mut numbers = answer.split_whitespace().map(|number| number.parse().expect("a number"));
        let rate = numbers.next().expect("a rate");
        let micros: Vec<f64> = numbers.collect();
        assert_eq!(micros.len(), EACH);
        Block { rate, micros }
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
