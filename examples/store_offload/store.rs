//! The Store: a client, and for a real Mooncake the master that it talks to.

use std::error::Error;
use std::time::Duration;

use moonring::{Engine, store};
#[cfg(feature = "mooncake")]
use store_master::Master;

use crate::args::{Args, Backend};
use crate::prompts;

/// How long the client may take to leave the Store.
const LIMIT: Duration = Duration::from_secs(30);

/// A Store for as long as this lives.
pub struct Store {
    pub client: store::Client,
    #[cfg(feature = "mooncake")]
    master: Option<Master>,
}

impl Store {
    /// Starts one with room for the blocks of both runs.
    pub fn start(args: &Args, engine: &Engine) -> Result<Store, Box<dyn Error>> {
        // As much again: objects are not packed without gaps, and a Store that is nearly full evicts.
        let room = (4 * prompts::distinct_blocks(args) * args.page_size) as u64 + (64 << 20);
        match args.store {
            Backend::Memory => Ok(Store {
                client: store::Client::memory(engine, &store::Memory::new(room))?,
                #[cfg(feature = "mooncake")]
                master: None,
            }),
            #[cfg(feature = "mooncake")]
            Backend::Mooncake => {
                let master = start_master()?;
                eprintln!("the master is process {} at {}", master.id(), master.address());
                let builder = store::builder("127.0.0.1", master.address()).segment_bytes(room);
                let client = builder.log_level(moonring::mooncake::LogLevel::Fatal).build(engine)?;
                Ok(Store { client, master: Some(master) })
            }
            #[cfg(not(feature = "mooncake"))]
            Backend::Mooncake => Err("built without the feature `mooncake`: only --store memory works".into()),
        }
    }

    /// Leaves the Store, then stops the master.
    pub fn stop(self) -> Result<(), Box<dyn Error>> {
        self.client.close(LIMIT)?;
        #[cfg(feature = "mooncake")]
        drop(self.master);
        Ok(())
    }
}

/// The master comes with the wheel, beside what was loaded.
#[cfg(feature = "mooncake")]
fn start_master() -> Result<Master, Box<dyn Error>> {
    let module = mooncake_sys::StoreApi::load()?.path();
    let wheel = module.ancestors().nth(2).ok_or_else(|| format!("{} is in no wheel", module.display()))?;
    Ok(Master::start(wheel, &[])?)
}
