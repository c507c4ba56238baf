//! Whether the server would take the configuration, and what it would regret.

use super::Finding;
use crate::facts::Facts;
use crate::facts::config::{ConfigFacts, Listener, Settings};

/// Every check of this part.
pub fn checks(facts: &Facts) -> Vec<Finding> {
    let config = &facts.config;
    let mut findings = vec![faults(config)];
    let Some(settings) = &config.settings else {
        return findings;
    };
    findings.push(files(config, settings));
    findings.push(keys(
        "config.api_keys",
        "serving.listen",
        "serving.auth.api_keys_path",
        "call",
        &settings.listen,
    ));
    findings.push(keys(
        "config.admin_tokens",
        "serving.admin_listen",
        "serving.auth.admin_tokens_path",
        "switch drafting and read metrics",
        &settings.admin_listen,
    ));
    findings.push(encryption(settings));
    findings.push(prompt_text(settings));
    findings
}

fn faults(config: &ConfigFacts) -> Finding {
    let id = "config.faults";
    if config.faults.is_empty() {
        return Finding::pass(id, "the server takes the configuration");
    }
    Finding::fail(
        id,
        config.faults.join("\n"),
        "correct these keys; `outrider-server --reference-config` prints every key with its meaning",
    )
}

fn files(config: &ConfigFacts, settings: &Settings) -> Finding {
    let id = "config.files";
    if !config.file_faults.is_empty() {
        return Finding::fail(
            id,
            config.file_faults.join("\n"),
            "correct these files; run this as the user of the server where only that one may read them",
        );
    }
    match settings.secret_files.len() {
        0 => Finding::skip(id, "no file of keys, tokens or certificates is named"),
        count => Finding::pass(
            id,
            format!("{count} files of keys and certificates are good"),
        ),
    }
}

fn keys(id: &'static str, key: &str, keys_key: &str, deed: &str, listener: &Listener) -> Finding {
    let endpoint = &listener.endpoint;
    match listener {
        Listener { has_keys: true, .. } => Finding::pass(
            id,
            format!("{key} {endpoint} asks for the keys of {keys_key}"),
        ),
        Listener {
            is_public: false, ..
        } => Finding::pass(id, format!("{key} {endpoint} is for this machine only")),
        // Without serving.auth.allow_unauthenticated the configuration would have a fault.
        _ => Finding::warn(
            id,
            format!(
                "everyone who reaches {key} {endpoint} may {deed}: {keys_key} is not set and serving.auth.allow_unauthenticated is true"
            ),
            format!(
                "set {keys_key}; `outrider-server --new-key NAME` makes a key; or listen on a loopback address behind a proxy that asks for keys"
            ),
        ),
    }
}

fn encryption(settings: &Settings) -> Finding {
    let id = "config.tls";
    let endpoint = &settings.listen.endpoint;
    if settings.tls {
        return Finding::pass(id, format!("serving.listen {endpoint} speaks TLS"));
    }
    if !settings.listen.is_public {
        return Finding::pass(
            id,
            format!("serving.listen {endpoint} is for this machine only"),
        );
    }
    Finding::warn(
        id,
        format!(
            "keys, prompts and answers cross the network in the clear on serving.listen {endpoint}"
        ),
        "set serving.tls.certificate_path and serving.tls.private_key_path; a proxy on the same machine that speaks TLS can use a loopback address",
    )
}

fn prompt_text(settings: &Settings) -> Finding {
    let id = "config.prompt_text";
    match &settings.audit {
        None => Finding::skip(id, "there is no audit log"),
        Some(audit) if audit.prompt_text => Finding::warn(
            id,
            format!(
                "prompts and answers are written as text into {}",
                audit.path
            ),
            "set serving.audit.prompt_text to false unless somebody answers for what is kept there",
        ),
        Some(audit) => Finding::pass(id, format!("{} holds no text of prompts", audit.path)),
    }
}
