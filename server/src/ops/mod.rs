//! Custom operators.

/// To come.
pub fn domain() -> ort::Result<ort::operator::OperatorDomain> {
    ort::operator::OperatorDomain::new("outrider")
}
