//! What a device can do, as far as it matters here.

use super::driver::{Driver, check};
use super::error::CudaError;

/// What was asked of one device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Device {
    ordinal: i32,
    /// Its streams write and wait for 64-bit words in memory.
    memory_operations: bool,
    /// It reaches host memory through the host's page tables.
    host_page_tables: bool,
    /// `GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`.
    flush_options: i32,
    /// `GPU_DIRECT_RDMA_WRITES_ORDERING`.
    write_ordering: i32,
}

/// How a stream that waits for a load is released when the load is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Release {
    /// By a store of the poller's: the device orders other devices' writes itself.
    Direct,
    /// By a helper thread, after a call of `cuFlushGPUDirectRDMAWrites`.
    Flushed,
}

impl Device {
    /// Of the current context.
    pub(super) fn of_current(driver: &Driver) -> Result<Device, CudaError> {
        const PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: i32 = 100;
        const GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: i32 = 117;
        const GPU_DIRECT_RDMA_WRITES_ORDERING: i32 = 118;
        const CAN_USE_64_BIT_STREAM_MEM_OPS: i32 = 122;
        let mut ordinal = 0;
        // SAFETY: an out pointer.
        check("cuCtxGetDevice", 0, unsafe { (driver.context_device)(&mut ordinal) })?;
        let ask = |attribute: i32| {
            let mut value = 0;
            // SAFETY: an out pointer, a device of the driver.
            let code = unsafe { (driver.device_attribute)(&mut value, attribute, ordinal) };
            check("cuDeviceGetAttribute", attribute as u64, code).map(|()| value)
        };
        Ok(Device {
            ordinal,
            memory_operations: ask(CAN_USE_64_BIT_STREAM_MEM_OPS)? != 0,
            host_page_tables: ask(PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)? != 0,
            flush_options: ask(GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?,
            write_ordering: ask(GPU_DIRECT_RDMA_WRITES_ORDERING)?,
        })
    }

    pub(super) fn memory_operations(&self) -> Result<(), CudaError> {
        if self.memory_operations { Ok(()) } else { Err(CudaError::NoMemoryOperations { device: self.ordinal }) }
    }

    /// How a stream that waits for a load may be released, or why it may not wait at all.
    pub(super) fn release(&self) -> Result<Release, CudaError> {
        const ORDERED_FOR_OWNER: i32 = 100;
        const FLUSH_BY_HOST: i32 = 1;
        self.memory_operations()?;
        let device = self.ordinal;
        if self.host_page_tables {
            // The driver may promise order and flush nothing there, although bytes are on their way.
            return Err(CudaError::SeveralPaths { device });
        }
        if self.write_ordering >= ORDERED_FOR_OWNER {
            Ok(Release::Direct)
        } else if self.flush_options & FLUSH_BY_HOST != 0 {
            Ok(Release::Flushed)
        } else {
            let (ordering, options) = (self.write_ordering, self.flush_options);
            Err(CudaError::NoWriteOrder { device, ordering, options })
        }
    }
}
