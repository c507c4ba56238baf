//! The official `openai` Python package as a client.

use anyhow::bail;
use outrider_bundle::manifest::Precision;
use outrider_tests::fixtures;
use outrider_tests::servers::Servers;
use xtask::python::Python;

pub fn the_official_client_is_served(servers: &Servers) -> anyhow::Result<()> {
    let server = servers.of(Precision::Int8)?;
    let output = Python::find(&fixtures::workspace()?)?
        .command()
        .arg(fixtures::data("python/test_openai.py"))
        .arg(server.endpoint())
        .output()?;
    if !output.status.success() {
        bail!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
