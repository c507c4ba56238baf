//! Where a device is asked for, nothing stands in for it.

use outrider_server::model::{ExecutionProvider, OnnxTarget};

use crate::options;
use crate::tiny::{self, Head};

/// The runtime of the tests knows no provider but the processor.
#[test]
fn a_device_that_cannot_be_had_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut options = options();
    options.session.execution_provider = ExecutionProvider::Cuda { device: 0 };
    let target = OnnxTarget::load(&tiny::bundle(dir.path(), Head::Float), &options);
    let error = target.err().expect("there is no such provider").to_string();
    assert!(error.to_lowercase().contains("cuda"), "{error}");
}
