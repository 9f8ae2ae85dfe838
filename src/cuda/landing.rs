//! When the bytes are there that a transport copies to GPU memory with the CPU.
//!
//! Mooncake's TCP does so with `cudaMemcpy` from memory that is not pinned, on the legacy default stream. Such a copy returns
//! when it is staged, and may still be on its way to the GPU. Two things make its end known: the pointer attribute
//! `SYNC_MEMOPS` of the memory makes the call wait for it, and an event that is recorded on the legacy stream afterwards
//! comes behind it.

use std::ffi::c_void;
use std::ptr;

use super::context::{Context, ContextInner, become_poller};
use super::driver::{Driver, SUCCESS, check};
use super::error::CudaError;
use super::stream::Stream;
use super::{CudaCode, RawHandle};
use crate::fence::Fence;
use crate::transport::RawMemory;

/// How to learn that copies to some memory have landed, when the copying call has returned.
#[derive(Debug)]
pub(crate) enum Landing {
    /// They have: the call waits for them.
    AtOnce,
    /// By an event behind them.
    Behind(LegacyCopies),
}

/// The copies that go over one context's legacy default stream.
#[derive(Debug)]
pub(crate) struct LegacyCopies(Stream);

impl Landing {
    /// Makes copies to GPU memory land before they return, if the memory can be told so.
    ///
    /// # Safety
    /// The memory's context stays until what this gives is gone, and the fences made of it.
    pub(crate) unsafe fn of(memory: RawMemory) -> Result<Landing, CudaError> {
        const MEMORY_TYPE: i32 = 2;
        const HOST: u32 = 1;
        const SYNC_MEMOPS: i32 = 6;
        let driver = Driver::get()?;
        let mut kind = 0_u32;
        attribute(driver, &mut kind, MEMORY_TYPE, memory)?;
        if kind == HOST {
            // Copied by the CPU, or by a copy that is waited for.
            return Ok(Landing::AtOnce);
        }
        // SAFETY: the caller's promise.
        let context = unsafe { context_of(driver, memory) }?;
        let current = context.0.enter()?;
        let on = 1_u32;
        // SAFETY: memory that the driver knows, and a value of the attribute's type.
        let told = unsafe { (driver.set_pointer_attribute)((&raw const on).cast(), SYNC_MEMOPS, memory.address) };
        // Memory that is mapped piece by piece cannot be told, but its whole context can.
        if told == SUCCESS || context_waits(&context.0)? {
            return Ok(Landing::AtOnce);
        }
        // SAFETY: the legacy stream of the context that was just entered.
        let legacy = unsafe { Stream::adopt(ptr::null_mut()) }?;
        drop(current);
        Ok(Landing::Behind(LegacyCopies(legacy)))
    }
}

impl LegacyCopies {
    /// A fence behind every copy that has returned; `None` if there can be none now, because a blocking stream of the context
    /// is being captured. Called by pollers. Else the `CUresult`.
    pub(crate) fn behind(&self) -> Result<Option<Fence>, u32> {
        const STREAM_CAPTURE_IMPLICIT: u32 = 906;
        let fence = become_poller(self.0.context().0.driver).and_then(|()| self.0.fence());
        match fence {
            Ok(fence) => Ok(Some(fence)),
            Err(CudaError::Call { code: CudaCode(STREAM_CAPTURE_IMPLICIT), .. }) => Ok(None),
            Err(CudaError::Call { code: CudaCode(code), .. }) => Err(code),
            Err(_) => unreachable!("the legacy stream is no thread's own and cannot be captured"),
        }
    }
}

fn attribute<T>(driver: &Driver, value: &mut T, which: i32, memory: RawMemory) -> Result<(), CudaError> {
    // SAFETY: an out pointer; each caller's type is the attribute's. The address is looked up and not followed.
    let code = unsafe { (driver.pointer_attribute)((&raw mut *value).cast::<c_void>(), which, memory.address) };
    match check("cuPointerGetAttribute", memory.address, code) {
        Err(CudaError::Call { code: CudaCode(1), .. }) => Err(CudaError::NotGpuMemory { address: memory.address }),
        other => other,
    }
}

/// The context of memory that the driver knows.
///
/// # Safety
/// The context stays until what this gives is gone.
unsafe fn context_of(driver: &'static Driver, memory: RawMemory) -> Result<Context, CudaError> {
    const CONTEXT: i32 = 1;
    const DEVICE_ORDINAL: i32 = 9;
    let mut raw: RawHandle = ptr::null_mut();
    match attribute(driver, &mut raw, CONTEXT, memory) {
        // SAFETY: the caller's promise.
        Ok(()) if !raw.is_null() => return unsafe { Context::adopt(raw) },
        // Memory that is mapped piece by piece belongs to its device: null, or, as `cuda.h` can be read, an error.
        Ok(()) | Err(CudaError::NotGpuMemory { .. }) => {}
        Err(error) => return Err(error),
    }
    let mut device = 0_i32;
    attribute(driver, &mut device, DEVICE_ORDINAL, memory)?;
    Context::primary_if_active(device)?.ok_or(CudaError::NoCurrentContext)
}

/// True if the context's flag says that copies land before they return. The context is current.
fn context_waits(context: &ContextInner) -> Result<bool, CudaError> {
    const CTX_SYNC_MEMOPS: u32 = 0x80;
    let mut flags = 0;
    // SAFETY: an out pointer.
    check("cuCtxGetFlags", 0, unsafe { (context.driver.context_flags)(&mut flags) })?;
    Ok(flags & CTX_SYNC_MEMOPS != 0)
}
