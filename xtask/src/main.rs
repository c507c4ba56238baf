//! `cargo xtask`: the command line for model owners and operators.

mod checkpoint;

fn main() {}
