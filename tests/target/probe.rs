//! What the width probe says of real graphs.

use outrider_server::model::probe::probe;
use outrider_server::model::{LosslessClass, OnnxTarget};

use crate::options;
use crate::tiny::{self, Head};

#[test]
fn a_graph_whose_rows_share_a_quantisation_scale_is_class_none() {
    for (head, class) in [
        (Head::Float, LosslessClass::Exact),
        (Head::PerTensorDynamic, LosslessClass::None),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let mut target =
            OnnxTarget::load(&tiny::bundle(dir.path(), head), &options()).expect("the graph loads");
        let report = probe(&mut target).expect("the probe runs");
        assert_eq!(report.class, class, "{head:?}: {report:?}");
    }
}
