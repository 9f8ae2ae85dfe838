//! Stream memory operations as nodes of CUDA graphs.
//!
//! A node's value is fixed when the graph is made, so it is set anew in the executable before each launch.

use std::sync::Arc;

use super::RawHandle;
use super::context::{ContextInner, Handle};
use super::driver::{MemoryNode, MemoryOperation, check, number};
use super::error::CudaError;
use super::stream::Stream;

/// One operation on one word, in a graph.
#[derive(Debug)]
pub(super) struct Node {
    context: Arc<ContextInner>,
    node: Handle,
    operation: u32,
    address: u64,
}

impl Node {
    /// Adds a node to a graph, behind `after`.
    ///
    /// # Safety
    /// `graph` and the nodes in `after` are valid, and the nodes are the graph's.
    pub(super) unsafe fn add(
        context: &Arc<ContextInner>,
        graph: RawHandle,
        after: &[RawHandle],
        operation: u32,
        address: u64,
        value: u64,
    ) -> Result<Node, CudaError> {
        let _current = context.enter()?;
        let mut node = std::ptr::null_mut();
        let result = with_parameters(context, operation, address, value, |parameters| {
            // SAFETY: an out pointer, parameters that live until the call returns, and handles that the caller vouches for.
            unsafe { (context.driver.add_memory_node)(&mut node, graph, after.as_ptr(), after.len(), parameters) }
        });
        check("cuGraphAddBatchMemOpNode", number(graph), result)?;
        Ok(Node { context: Arc::clone(context), node: Handle(node), operation, address })
    }

    /// Queues the operation on a stream that is being captured, and finds its node. The stream is entered.
    pub(super) fn capture(stream: &Stream, operation: u32, address: u64, value: u64) -> Result<Node, CudaError> {
        let context = &stream.context().0;
        let driver = context.driver;
        let raw = stream.as_raw();
        if stream.capture_status()? != 1 {
            return Err(CudaError::NotCapturing { stream: number(raw) });
        }
        let (function, code) = match operation {
            // SAFETY: a live stream, and a word that the caller keeps.
            MemoryOperation::WAIT => ("cuStreamWaitValue64", unsafe { (driver.wait_value)(raw, address, value, 0) }),
            // SAFETY: as above.
            _ => ("cuStreamWriteValue64", unsafe { (driver.write_value)(raw, address, value, 0) }),
        };
        check(function, number(raw), code)?;
        let (mut status, mut id, mut graph) = (0, 0, std::ptr::null_mut());
        let (mut last, mut count) = (std::ptr::null(), 0);
        // SAFETY: a live stream and out pointers.
        let code = unsafe { (driver.capture_info)(raw, &mut status, &mut id, &mut graph, &mut last, &mut count) };
        check("cuStreamGetCaptureInfo", number(raw), code)?;
        if status != 1 || count != 1 {
            // What was just captured is the one thing that whatever comes next on the stream follows.
            return Err(CudaError::NotCapturing { stream: number(raw) });
        }
        // SAFETY: the driver's array has `count` nodes until the stream's next call.
        let node = Handle(unsafe { *last });
        Ok(Node { context: Arc::clone(context), node, operation, address })
    }

    /// Sets the value for the next launches of an executable.
    ///
    /// # Safety
    /// `exec` is a valid executable of the node's graph, which is still there.
    pub(super) unsafe fn set(&self, exec: RawHandle, value: u64) -> Result<(), CudaError> {
        let context = &self.context;
        let _current = context.enter()?;
        let result = with_parameters(context, self.operation, self.address, value, |parameters| {
            // SAFETY: handles that the caller vouches for; the parameters live until the call returns.
            unsafe { (context.driver.set_memory_node)(exec, self.node.0, parameters) }
        });
        check("cuGraphExecBatchMemOpNodeSetParams", number(exec), result)
    }

    pub(super) fn as_raw(&self) -> RawHandle {
        self.node.0
    }
}

fn with_parameters(
    context: &ContextInner,
    operation: u32,
    address: u64,
    value: u64,
    call: impl FnOnce(&MemoryNode) -> u32,
) -> u32 {
    let operation = MemoryOperation { operation, address, value, flags: 0, alias: 0, unused: 0 };
    call(&MemoryNode { context: context.as_raw(), count: 1, operations: &operation, flags: 0 })
}
