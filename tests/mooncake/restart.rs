//! A peer that is started anew under its old name, which takes a metadata server: the one in Mooncake's own master.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mooncake_sys::Api;
use moonring::code::errno;
use moonring::{Refusal, Region, Ring, opcode};

use crate::peer::{LIMIT, METADATA, NAME, Peer, engine, fill, rerun};

const PAGE: usize = 4096;

/// Mooncake's master with its metadata server; killed when dropped.
struct Master {
    child: Child,
    url: String,
}

impl Master {
    fn start() -> Master {
        let api = Api::load().unwrap_or_else(|error| panic!("{error}"));
        let program = api.path().parent().unwrap_or(Path::new("")).join("mooncake_master");
        let free: Vec<TcpListener> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let [rpc, metrics, http] = [0, 1, 2].map(|at| free[at].local_addr().unwrap().port());
        drop(free);
        let child = Command::new(&program)
            .args([format!("-rpc_port={rpc}"), format!("-metrics_port={metrics}"), "-metrics_host=127.0.0.1".into()])
            .args(["-enable_http_metadata_server=true", "-http_metadata_server_host=127.0.0.1"])
            .arg(format!("-http_metadata_server_port={http}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        let master = Master { child, url: format!("http://127.0.0.1:{http}/metadata") };
        let end = Instant::now() + LIMIT;
        while TcpStream::connect(("127.0.0.1", http)).is_err() {
            assert!(Instant::now() < end, "the metadata server does not come up");
            std::thread::sleep(Duration::from_millis(20));
        }
        master
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn h1_a_restarted_peer_is_reached_by_opening_it_again_and_never_by_old_handles() {
    if !rerun(
        "restart::h1_a_restarted_peer_is_reached_by_opening_it_again_and_never_by_old_handles",
        &[("MC_TCP_BIND_ADDRESS", "127.0.0.1")],
    ) {
        return;
    }
    let master = Master::start();
    let start = || Peer::start_with(4 * PAGE, &[(METADATA, &master.url), (NAME, "moonring-test-peer")]);
    // SAFETY: no thread of this process reads the environment now but through std, which takes its lock.
    unsafe {
        std::env::set_var(METADATA, &master.url);
        std::env::set_var(NAME, "moonring-test-near");
    }
    let engine = engine();
    assert_eq!(engine.name(), "moonring-test-near");
    let region = engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    fill(&region, 1, 0, PAGE);
    let mut ring = Ring::builder().build(8, &engine).unwrap();
    let mut run = |entry: moonring::Entry| {
        ring.submission().push(entry)?;
        ring.submit().unwrap();
        assert_eq!(ring.wait_timeout(1, LIMIT), Ok(1));
        Ok::<_, moonring::PushError>(ring.completion().next().unwrap())
    };
    let write = |segment: &moonring::Segment, address| {
        opcode::Write::new(region.slice(..).unwrap(), segment.at(address)).build()
    };

    let mut old_peer = start();
    assert_eq!(old_peer.info.segment, "moonring-test-peer");
    let old = engine.open_segment("moonring-test-peer", LIMIT).unwrap();
    assert_eq!(run(write(&old, old_peer.info.address)).unwrap().result(), Ok(PAGE as u32));
    assert_eq!(old_peer.matching(1, 0, PAGE), PAGE);
    let old_address = old_peer.info.address;
    // The server refuses a second engine of a name: the first one has to leave.
    assert_eq!(old_peer.ask("leave"), "left");
    drop(old_peer);

    let mut new_peer = start();
    new_peer.fill(2, 0, 4 * PAGE);
    // The old handle leads nowhere, or to the same engine's refusal: not to other memory.
    let cqe = run(write(&old, old_address)).unwrap();
    assert_eq!(cqe.res(), -errno::EIO, "{cqe:?}");
    assert_eq!(new_peer.matching(2, 0, 4 * PAGE), 4 * PAGE);

    let new = engine.reopen_segment("moonring-test-peer", LIMIT).unwrap();
    let refused = run(write(&old, old_address)).unwrap_err();
    assert!(matches!(refused.reason, Refusal::StaleSegment(_)), "{refused}");
    assert_eq!(run(write(&new, new_peer.info.address)).unwrap().result(), Ok(PAGE as u32));
    assert_eq!(new_peer.matching(1, 0, PAGE), PAGE);
}
