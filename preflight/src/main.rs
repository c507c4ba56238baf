//! `outrider-preflight`: says before a start whether a server will run here.

fn main() {}
