//! Reads a configuration the way the server does.

use outrider_server::config::{self, Config, ConfigError, Sources};
use outrider_server::launch;
use outrider_server::listen::Endpoint;

use super::{FILE_LIMIT, child};
use crate::facts::config::{
    Audit, ConfigFacts, ExecutionProvider, Listener, NamedPath, Settings, Speculative,
};

/// Device that the server takes: it has no key for another one.
const DEVICE_ID: u32 = 0;

/// Reads the configuration and the files of keys and certificates that it names.
pub fn collect(sources: &Sources) -> ConfigFacts {
    let sources = sources.clone();
    child::within(FILE_LIMIT, move || read(&sources)).unwrap_or_else(|error| ConfigFacts {
        faults: vec![format!(
            "the configuration and the files that it names could not be read: {error}"
        )],
        ..ConfigFacts::default()
    })
}

fn read(sources: &Sources) -> ConfigFacts {
    let config = match Config::load(sources) {
        Ok(config) => config,
        Err(ConfigError::Faults(faults)) => {
            return ConfigFacts {
                faults: faults.iter().map(ToString::to_string).collect(),
                ..ConfigFacts::default()
            };
        }
        Err(error) => {
            return ConfigFacts {
                faults: vec![error.to_string()],
                ..ConfigFacts::default()
            };
        }
    };
    let file_faults = launch::file_faults(&config);
    ConfigFacts {
        execution_provider: match config.runtime.execution_provider {
            config::ExecutionProvider::Cpu => ExecutionProvider::Cpu,
            config::ExecutionProvider::Cuda => ExecutionProvider::Cuda,
        },
        device_id: DEVICE_ID,
        faults: Vec::new(),
        file_faults: file_faults.iter().map(ToString::to_string).collect(),
        settings: Some(settings(&config)),
    }
}

fn settings(config: &Config) -> Settings {
    let text = |path: &std::path::Path| path.display().to_string();
    let named = |key: &str, path: &std::path::Path| NamedPath {
        key: key.to_owned(),
        path: text(path),
    };
    let Config {
        auth,
        tls,
        runtime,
        speculative,
        ..
    } = config;
    let mut secret_files = Vec::new();
    if let Some(path) = &auth.api_keys_path {
        secret_files.push(named("serving.auth.api_keys_path", path));
    }
    if let Some(path) = &auth.admin_tokens_path {
        secret_files.push(named("serving.auth.admin_tokens_path", path));
    }
    if let Some(tls) = tls {
        secret_files.push(named("serving.tls.certificate_path", &tls.certificate_path));
        secret_files.push(named("serving.tls.private_key_path", &tls.private_key_path));
    }
    Settings {
        bundle: text(&config.bundle),
        onnxruntime_library: text(&runtime.onnxruntime_library),
        listen: listener(&Endpoint::Tcp(config.listen), auth.api_keys_path.is_some()),
        admin_listen: listener(&config.admin_listen, auth.admin_tokens_path.is_some()),
        allow_unauthenticated: auth.allow_unauthenticated,
        tls: tls.is_some(),
        secret_files,
        max_connections: config.http.max_connections,
        speculative: Speculative {
            enabled: speculative.enabled,
            required: speculative.required,
            draft_block_size: speculative.draft_block_size,
            candidate_topk: speculative.candidate_topk,
        },
        max_concurrency: runtime.max_concurrency,
        context_tokens: runtime.context_tokens,
        kv_cache_ratio: runtime.kv_cache_ratio,
        prefill_chunk_tokens: runtime.prefill_chunk_tokens,
        intra_op_threads: runtime.intra_op_threads.map(usize::from),
        prefix_cache_slots: if runtime.prefix_cache {
            runtime.prefix_cache_slots
        } else {
            0
        },
        log_path: config.logging.path.as_deref().map(text),
        audit: config.audit.as_ref().map(|audit| Audit {
            path: text(&audit.path),
            prompt_text: audit.prompt_text,
            max_file_bytes: audit.max_file_bytes,
            max_files: audit.max_files,
        }),
    }
}

fn listener(endpoint: &Endpoint, has_keys: bool) -> Listener {
    Listener {
        endpoint: endpoint.to_string(),
        is_public: match endpoint {
            Endpoint::Tcp(address) => !address.ip().to_canonical().is_loopback(),
            Endpoint::Unix(_) => false,
        },
        has_keys,
    }
}
