//! What the checks make of facts: one healthy machine, and one change at a time, each as a file of facts that was read back.

use std::collections::BTreeMap;

use outrider_bundle::Manifest;
use outrider_bundle::manifest::{
    Attention, DraftFacts, FileEntry, GenerationDefaults, Precision, Source, TargetFacts, TextFacts,
};
use outrider_preflight::checks::{self, Finding, Outcome};
use outrider_preflight::facts::bundle::{BundleFacts, Cache, Depth, GraphFacts};
use outrider_preflight::facts::config::{
    Audit, ConfigFacts, ExecutionProvider, Listener, NamedPath, Settings, Speculative,
};
use outrider_preflight::facts::host::{
    Clock, FileSystem, HostFacts, Kernel, Limits, Memory, PathFacts, PortFacts, PortFault, Purpose,
    SharedMemory, User,
};
use outrider_preflight::facts::runtime::{Library, Needed, Probe, Processor, RuntimeFacts};
use outrider_preflight::facts::{Facts, Reading, SCHEMA_VERSION};
use outrider_preflight::report::{self, Report};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

fn file(size_bytes: u64) -> FileEntry {
    FileEntry {
        size_bytes,
        sha256: "0".repeat(64),
    }
}

fn manifest() -> Manifest {
    Manifest {
        schema_version: 1,
        name: "model".to_owned(),
        files: BTreeMap::from([
            ("model.onnx".to_owned(), file(1 << 20)),
            ("model.onnx.data".to_owned(), file(4 * GIB)),
            ("draft.onnx".to_owned(), file(1 << 18)),
            ("draft.onnx.data".to_owned(), file(GIB / 2)),
            ("tokenizer.json".to_owned(), file(2 << 20)),
        ]),
        target: TargetFacts {
            graph: "model.onnx".to_owned(),
            architecture: "llama".to_owned(),
            precision: Precision::Int8,
            attention: Attention::Native,
            layers: 2,
            hidden_size: 1024,
            kv_heads: 4,
            head_dim: 64,
            vocab_size: 32_000,
            context_tokens: 8192,
            kv_dtype: "float16".to_owned(),
            taps: vec![0, 1],
        },
        draft: Some(DraftFacts {
            graph: "draft.onnx".to_owned(),
            architecture: "DFlash2DraftModel".to_owned(),
            precision: Precision::Int8,
            form: Attention::Native,
            layers: 1,
            kv_heads: 4,
            head_dim: 64,
            kv_dtype: "float16".to_owned(),
            vocabulary_columns: 8192,
            block_size: 8,
            top_k: 4,
            mask_token_id: 3,
            target_layer_ids: vec![0, 1],
            context_tokens: 4096,
        }),
        text: TextFacts {
            tokenizer: "tokenizer.json".to_owned(),
            chat_template: None,
            bos_token: None,
            eos_token: None,
            add_bos: false,
        },
        generation: GenerationDefaults::default(),
        tools: BTreeMap::new(),
        sources: vec![Source {
            name: "checkpoint".to_owned(),
            sha256: "0".repeat(64),
            licence: Some("Apache-2.0".to_owned()),
        }],
    }
}

fn graph(initializer_bytes: u64, layers: usize, row_bytes: u64) -> Reading<GraphFacts> {
    let caches = (0..layers).flat_map(|layer| {
        ["key", "value"].map(|side| Cache {
            name: format!("{side}_cache.{layer}"),
            row_bytes: Some(row_bytes),
        })
    });
    Reading::Known(GraphFacts {
        initializer_bytes,
        caches: caches.collect(),
        logits_columns: 32_000,
        tap_columns: 2048,
        live_row_bytes: BTreeMap::from([
            ("sequence".to_owned(), 64 << 10),
            ("n".to_owned(), 256 << 10),
        ]),
        ops: BTreeMap::from([("ai.onnx.MatMulInteger".to_owned(), 14)]),
        row_mixing_nodes: Vec::new(),
    })
}

fn path(key: &str, path: &str, purpose: Purpose) -> PathFacts {
    PathFacts {
        key: key.to_owned(),
        path: path.to_owned(),
        purpose,
        fault: None,
        is_writable: false,
        file_system: Some(FileSystem {
            mount_point: "/srv".to_owned(),
            kind: "ext4".to_owned(),
            free_bytes: 100 * GIB,
        }),
    }
}

fn port(key: &str, endpoint: &str, port: u16) -> PortFacts {
    PortFacts {
        key: key.to_owned(),
        endpoint: endpoint.to_owned(),
        port: Some(port),
        ..PortFacts::default()
    }
}

fn needed(name: &str, by: &str, found: bool, at_run_time: bool) -> Needed {
    Needed {
        name: name.to_owned(),
        by: by.to_owned(),
        found: found.then(|| format!("/usr/lib/{name}")),
        real_path: found.then(|| format!("/usr/lib/{name}")),
        at_run_time,
    }
}

fn library(name: &str, needed: Vec<Needed>) -> Library {
    Library {
        path: format!("/opt/ort/{name}"),
        real_path: format!("/opt/ort/{name}"),
        size_bytes: 28 << 20,
        arch: "x86_64".to_owned(),
        version: Some("1.31.1".to_owned()),
        c_library_version: Some("2.27".to_owned()),
        run_paths: Vec::new(),
        needed,
    }
}

/// A machine on which everything is in order.
fn healthy() -> Facts {
    let settings = Settings {
        bundle: "/srv/model".to_owned(),
        onnxruntime_library: "/opt/ort/libonnxruntime.so".to_owned(),
        listen: Listener {
            endpoint: "0.0.0.0:8443".to_owned(),
            is_public: true,
            has_keys: true,
        },
        admin_listen: Listener {
            endpoint: "127.0.0.1:8081".to_owned(),
            is_public: false,
            has_keys: false,
        },
        allow_unauthenticated: false,
        tls: true,
        secret_files: vec![NamedPath {
            key: "serving.auth.api_keys_path".to_owned(),
            path: "/etc/outrider/keys".to_owned(),
        }],
        max_connections: 16_384,
        speculative: Speculative {
            enabled: true,
            ..Speculative::default()
        },
        max_concurrency: 8,
        context_tokens: None,
        kv_cache_ratio: 0.5,
        prefill_chunk_tokens: 64,
        intra_op_threads: None,
        prefix_cache_slots: 2,
        log_path: Some("/srv/log/outrider.log".to_owned()),
        audit: Some(Audit {
            path: "/srv/log/audit.jsonl".to_owned(),
            prompt_text: false,
            max_file_bytes: 100 << 20,
            max_files: 10,
        }),
    };
    Facts {
        schema_version: SCHEMA_VERSION,
        config: ConfigFacts {
            settings: Some(settings),
            ..ConfigFacts::default()
        },
        gpu: Default::default(),
        runtime: RuntimeFacts {
            library: Reading::Known(library(
                "libonnxruntime.so",
                vec![needed("libc.so.6", "libonnxruntime.so", true, false)],
            )),
            minimum_version: (1, 31),
            cuda_provider: None,
            probe: Reading::Known(Probe {
                version: "build info".to_owned(),
                elapsed_ms: 100,
            }),
            processor: Reading::Known(Processor {
                arch: "x86_64".to_owned(),
                model: "a processor".to_owned(),
                features: ["avx2", "avx512_vnni"].map(str::to_owned).to_vec(),
                usable_cores: 8,
            }),
        },
        bundle: BundleFacts {
            depth: Depth::Digests,
            manifest: Reading::Known(manifest()),
            digest: Reading::Known("abc".to_owned()),
            target_faults: Vec::new(),
            draft_faults: Vec::new(),
            target: graph(4 * GIB, 2, 512),
            draft: Some(graph(GIB / 2, 1, 512)),
        },
        host: HostFacts {
            user: User {
                id: 990,
                name: Some("outrider".to_owned()),
                group_ids: vec![990],
            },
            read_by_user: false,
            memory: Memory {
                total_bytes: Reading::Known(32 * GIB),
                available_bytes: Reading::Known(24 * GIB),
                cgroup_limit_bytes: None,
                shared: Reading::Known(SharedMemory {
                    size_bytes: 16 * GIB,
                    used_bytes: 1 << 20,
                }),
            },
            paths: Reading::Known(vec![
                path(
                    "serving.bundle",
                    "/srv/model/model.onnx.data",
                    Purpose::Read,
                ),
                path(
                    "serving.logging.path",
                    "/srv/log/outrider.log",
                    Purpose::Append,
                ),
                path(
                    "serving.audit.path",
                    "/srv/log/audit.jsonl",
                    Purpose::Append,
                ),
            ]),
            ports: vec![
                port("serving.listen", "0.0.0.0:8443", 8443),
                port("serving.admin_listen", "127.0.0.1:8081", 8081),
            ],
            limits: Limits {
                open_files: Some(65_536),
                processes: None,
                cgroup_processes: Some(4096),
                address_space_bytes: None,
                data_bytes: None,
            },
            kernel: Kernel {
                overcommit_memory: Some(0),
                max_map_count: Some(65_530),
                somaxconn: Some(4096),
                unprivileged_port_start: Some(1024),
            },
            clock: Clock {
                unix_time_s: 1_800_000_000,
                source: Some("tsc".to_owned()),
                synchronised: Some(true),
            },
        },
    }
}

/// The findings that facts give once they were written down and read again; those of GPUs have tests of their own.
fn findings(facts: &Facts) -> Vec<Finding> {
    let json = serde_json::to_string(facts).unwrap();
    let read: Facts = serde_json::from_str(&json).unwrap();
    assert_eq!(read, *facts, "facts are the same after they were read back");
    let mut findings = checks::run(&read);
    findings.retain(|finding| finding.part() != "gpu");
    findings
}

#[test]
fn a_healthy_machine_passes_every_check() {
    insta::assert_snapshot!(text(findings(&healthy())));
}

fn text(findings: Vec<Finding>) -> String {
    let text = Report::new(findings).to_text();
    anstream::adapter::strip_str(&text).to_string()
}

type Change = fn(&mut Facts);

fn settings(facts: &mut Facts) -> &mut Settings {
    facts.config.settings.as_mut().unwrap()
}

fn of_manifest(facts: &mut Facts) -> &mut Manifest {
    match &mut facts.bundle.manifest {
        Reading::Known(manifest) => manifest,
        Reading::Unknown(_) => unreachable!("the healthy machine has a manifest"),
    }
}

fn of_target(facts: &mut Facts) -> &mut GraphFacts {
    match &mut facts.bundle.target {
        Reading::Known(graph) => graph,
        Reading::Unknown(_) => unreachable!("the healthy machine has a target"),
    }
}

fn paths(facts: &mut Facts) -> &mut Vec<PathFacts> {
    match &mut facts.host.paths {
        Reading::Known(paths) => paths,
        Reading::Unknown(_) => unreachable!("the healthy machine has paths"),
    }
}

/// A CUDA deployment with the provider of ONNX Runtime, whose libraries are there or not.
fn on_cuda(facts: &mut Facts, found: bool) {
    facts.config.execution_provider = ExecutionProvider::Cuda;
    let provider = "libonnxruntime_providers_cuda.so";
    facts.runtime.cuda_provider = Some(Reading::Known(library(
        provider,
        vec![
            needed("libcublas.so.13", provider, found, false),
            needed("libcudart.so.13", provider, found, false),
            needed("libcuda.so.1", provider, found, false),
            needed("libcudnn.so.9", provider, found, true),
        ],
    )));
    let manifest = of_manifest(facts);
    manifest.target.attention = Attention::Portable;
    manifest.draft.as_mut().unwrap().form = Attention::Portable;
}

/// Each with a name that says what is wrong.
const CHANGES: &[(&str, Change)] = &[
    ("the configuration has faults", |facts| {
        facts.config = ConfigFacts {
            faults: vec![
                "serving.bundle: is required".to_owned(),
                "serving.runtime.kv_cache_ratio: is 2, but it must be a number above 0 and at most 1".to_owned(),
            ],
            ..ConfigFacts::default()
        };
    }),
    ("a file of keys is empty", |facts| {
        facts.config.file_faults =
            vec!["serving.auth.api_keys_path: there is no key in keys".to_owned()];
    }),
    (
        "a public listener asks for no key and speaks no TLS",
        |facts| {
            let settings = settings(facts);
            settings.listen.has_keys = false;
            settings.admin_listen = Listener {
                endpoint: "0.0.0.0:8081".to_owned(),
                is_public: true,
                has_keys: false,
            };
            settings.allow_unauthenticated = true;
            settings.tls = false;
        },
    ),
    ("prompts are written down", |facts| {
        settings(facts).audit.as_mut().unwrap().prompt_text = true;
    }),
    ("the server runs as root", |facts| facts.host.user.id = 0),
    ("a port is taken and another is for root", |facts| {
        facts.host.ports[0].fault = Some(
            "cannot listen on 0.0.0.0:8443 (serving.listen): Address already in use (os error 98)"
                .to_owned(),
        );
        facts.host.ports[0].fault_kind = Some(PortFault::Taken);
        facts.host.ports[0].holder = Some("process 7 (nginx)".to_owned());
        facts.host.ports[1].port = Some(443);
    }),
    (
        "weights are unreadable for the user of the server",
        |facts| {
            paths(facts)[0].fault = Some(
            "/srv/model/model.onnx.data: user 990 may not read /srv/model/model.onnx.data, which has mode 600, user 0 and group 0 (serving.bundle)".to_owned(),
        );
        },
    ),
    (
        "weights can be changed by the user of the server",
        |facts| {
            paths(facts)[0].is_writable = true;
        },
    ),
    ("the bundle is on a network file system", |facts| {
        paths(facts)[0].file_system.as_mut().unwrap().kind = "nfs4".to_owned();
    }),
    ("a file system does not answer", |facts| {
        facts.host.paths = Reading::Unknown("no answer within 5000 ms".to_owned());
    }),
    ("the log has no place and the audit log no room", |facts| {
        paths(facts)[1].fault = Some(
            "cannot append to /srv/log/outrider.log (serving.logging.path): No such file or directory (os error 2)"
                .to_owned(),
        );
        paths(facts)[2].file_system.as_mut().unwrap().free_bytes = 1 << 20;
    }),
    (
        "an address is of another machine, and the place of a socket is missing",
        |facts| {
            facts.host.ports[0].fault = Some(
            "cannot listen on 192.0.2.1:80 (serving.listen): Cannot assign requested address (os error 99)"
                .to_owned(),
        );
            facts.host.ports[0].fault_kind = Some(PortFault::ElsewhereAddress);
            facts.host.ports[1].fault = Some(
            "cannot listen on unix:/run/none/a.sock (serving.admin_listen): No such file or directory (os error 2)"
                .to_owned(),
        );
            facts.host.ports[1].fault_kind = Some(PortFault::Path);
        },
    ),
    (
        "a port and the directory of a socket are for others",
        |facts| {
            facts.host.ports[0].port = Some(443);
            facts.host.ports[0].fault = Some(
                "cannot listen on 0.0.0.0:443 (serving.listen): Permission denied (os error 13)"
                    .to_owned(),
            );
            facts.host.ports[1].port = None;
            facts.host.ports[1].fault = Some(
            "cannot listen on unix:/run/a.sock (serving.admin_listen): Permission denied (os error 13)"
                .to_owned(),
        );
            for port in &mut facts.host.ports {
                port.fault_kind = Some(PortFault::Forbidden);
            }
        },
    ),
    (
        "the audit log can be appended to and not rotated",
        |facts| {
            paths(facts)[2].purpose = Purpose::Create;
            paths(facts)[2].fault = Some(
            "cannot make and rename files beside /srv/log/audit.jsonl (serving.audit.path): Permission denied (os error 13)"
                .to_owned(),
        );
        },
    ),
    ("a limit of address space can't hold the weights", |facts| {
        facts.host.limits.address_space_bytes = Some(4 * GIB);
    }),
    (
        "a limit of data holds the weights and little else",
        |facts| {
            facts.host.limits.data_bytes = Some(8 * GIB);
        },
    ),
    (
        "keys and values of the target fit and those of the draft do not",
        |facts| {
            settings(facts).kv_cache_ratio = 0.0069;
        },
    ),
    ("chunks of prompts are wide", |facts| {
        settings(facts).prefill_chunk_tokens = 1 << 19;
        settings(facts).context_tokens = Some(8192);
        settings(facts).max_concurrency = 700;
        settings(facts).kv_cache_ratio = 1.0;
    }),
    ("the audit log is in memory", |facts| {
        paths(facts)[2].file_system.as_mut().unwrap().kind = "tmpfs".to_owned();
    }),
    ("limits are low", |facts| {
        facts.host.limits = Limits {
            open_files: Some(1024),
            processes: Some(4096),
            cgroup_processes: Some(100),
            ..Limits::default()
        };
        facts.host.kernel = Kernel {
            overcommit_memory: Some(2),
            max_map_count: Some(1000),
            somaxconn: Some(128),
            unprivileged_port_start: None,
        };
    }),
    ("files in memory hold most of it", |facts| {
        facts.host.memory.shared = Reading::Known(SharedMemory {
            size_bytes: 16 * GIB,
            used_bytes: 12 * GIB,
        });
    }),
    ("shared memory can't be read", |facts| {
        facts.host.memory.shared = Reading::Unknown("/dev/shm: not mounted".to_owned());
    }),
    ("the clock was never set", |facts| {
        facts.host.clock.unix_time_s = 5
    }),
    (
        "nobody says that the clock is right, and it is slow to read",
        |facts| {
            facts.host.clock.synchronised = None;
            facts.host.clock.source = Some("hpet".to_owned());
        },
    ),
    ("there is no ONNX Runtime", |facts| {
        let missing = "/opt/ort/libonnxruntime.so: No such file or directory (os error 2)";
        facts.runtime.library = Reading::Unknown(missing.to_owned());
        facts.runtime.probe = Reading::Unknown(missing.to_owned());
    }),
    ("ONNX Runtime is old and for another processor", |facts| {
        facts.runtime.library = Reading::Known(Library {
            arch: "aarch64".to_owned(),
            version: Some("1.26.0".to_owned()),
            ..library("libonnxruntime.so", Vec::new())
        });
    }),
    ("the session crashes", |facts| {
        facts.runtime.probe = Reading::Unknown("signal: 4 (SIGILL): ".to_owned());
    }),
    (
        "the processor has no instructions for 8-bit products, and too many threads are asked for",
        |facts| {
            if let Reading::Known(processor) = &mut facts.runtime.processor {
                processor.features = vec!["avx2".to_owned()];
            }
            settings(facts).intra_op_threads = Some(64);
        },
    ),
    (
        "CUDA libraries are missing, which ends in silence on the CPU elsewhere",
        |facts| {
            on_cuda(facts, false);
            facts.runtime.probe =
                Reading::Unknown("exit status: 2: libcublas.so.13: cannot open".to_owned());
        },
    ),
    ("the CUDA provider is not there", |facts| {
        on_cuda(facts, true);
        facts.runtime.cuda_provider = Some(Reading::Unknown(
            "/opt/ort/libonnxruntime_providers_shared.so does not exist".to_owned(),
        ));
    }),
    ("native graphs are to run on CUDA", |facts| {
        on_cuda(facts, true);
        of_manifest(facts).target.attention = Attention::Native;
    }),
    ("there is no bundle", |facts| {
        facts.bundle = BundleFacts {
            manifest: Reading::Unknown("cannot read /srv/model/bundle.json".to_owned()),
            ..BundleFacts::default()
        };
    }),
    ("weights of the target are damaged", |facts| {
        facts.bundle.target_faults =
            vec!["model.onnx.data: has sha256 1, the manifest says 0".to_owned()];
    }),
    ("a required draft is damaged", |facts| {
        facts.bundle.draft_faults = vec!["draft.onnx: missing".to_owned()];
        settings(facts).speculative.required = true;
    }),
    ("a draft is required and there is none", |facts| {
        settings(facts).speculative.required = true;
        of_manifest(facts).draft = None;
        facts.bundle.draft = None;
    }),
    ("the draft was made for another target", |facts| {
        of_manifest(facts).draft.as_mut().unwrap().target_layer_ids = vec![0];
        of_manifest(facts)
            .draft
            .as_mut()
            .unwrap()
            .vocabulary_columns = 50_000;
    }),
    ("the draft is asked for more than it has", |facts| {
        settings(facts).speculative.draft_block_size = Some(16);
        settings(facts).speculative.candidate_topk = Some(64);
    }),
    ("blocks are wider than the probe", |facts| {
        of_manifest(facts).draft.as_mut().unwrap().block_size = 32;
    }),
    ("activations are quantised over all rows at once", |facts| {
        of_target(facts).row_mixing_nodes = vec!["DynamicQuantizeLinear q".to_owned()];
    }),
    (
        "activations are quantised over all rows at once and drafting is required",
        |facts| {
            of_target(facts).row_mixing_nodes = vec!["ReduceMax largest".to_owned()];
            settings(facts).speculative.required = true;
        },
    ),
    (
        "the context is longer than the model's, and a licence is not known",
        |facts| {
            settings(facts).context_tokens = Some(16_384);
            of_manifest(facts).sources[0].licence = None;
        },
    ),
    ("keys and values take more than their share", |facts| {
        settings(facts).kv_cache_ratio = 0.005;
    }),
    ("weights do not fit", |facts| {
        facts.host.memory.available_bytes = Reading::Known(4 * GIB + (700 << 20));
    }),
    ("it fits without a margin", |facts| {
        settings(facts).context_tokens = Some(4096);
        facts.host.memory.available_bytes = Reading::Known(12 * GIB + (800 << 20));
    }),
    ("slots are too many and could be fewer", |facts| {
        settings(facts).max_concurrency = 1024;
        settings(facts).kv_cache_ratio = 1.0;
    }),
    ("free memory can't be read", |facts| {
        facts.host.memory.available_bytes =
            Reading::Unknown("/proc/meminfo has no MemAvailable".to_owned());
    }),
    ("a cache has no fixed shape", |facts| {
        of_target(facts).caches[0].row_bytes = None;
    }),
];

#[test]
fn every_change_for_the_worse_is_found_and_comes_with_a_remedy() {
    let before = findings(&healthy());
    let mut text_of_all = String::new();
    for (name, change) in CHANGES {
        let mut facts = healthy();
        change(&mut facts);
        let after = findings(&facts);
        let news: Vec<Finding> = after
            .into_iter()
            .filter(|finding| !before.contains(finding))
            .filter(|finding| !matches!(finding.outcome, Outcome::Pass | Outcome::Skip))
            .collect();
        assert!(!news.is_empty(), "{name}: nothing was found");
        for finding in &news {
            assert!(finding.remedy.is_some(), "{name}: {finding:?}");
        }
        text_of_all.push_str(&format!("# {name}\n\n{}\n", text(news)));
    }
    insta::assert_snapshot!(text_of_all);
}

/// What `--facts-out` says of `libonnxruntime_providers_cuda.so` of the package onnxruntime-gpu 1.31.1 on a machine without CUDA.
const REAL_PROVIDER: &str = include_str!("data/onnxruntime-gpu-1.31.1-cuda-provider.json");

#[test]
fn the_real_cuda_provider_names_its_cuda_and_every_library_that_a_machine_without_it_lacks() {
    let provider: Library = serde_json::from_str(REAL_PROVIDER).unwrap();
    assert_eq!(provider.cuda_major(), Some(13));
    let mut facts = healthy();
    on_cuda(&mut facts, true);
    facts.runtime.cuda_provider = Some(Reading::Known(provider));
    let mut findings = findings(&facts);
    findings.retain(|finding| finding.id == "runtime.cuda_provider");
    insta::assert_snapshot!(text(findings));
}

#[test]
fn every_check_is_documented_and_every_documented_check_exists() {
    let mut found: Vec<&str> = findings(&healthy())
        .iter()
        .map(|finding| finding.id)
        .collect();
    found.sort_unstable();
    found.dedup();
    let mut documented: Vec<&str> = report::documented_ids()
        .filter(|id| !id.starts_with("gpu."))
        .collect();
    documented.sort_unstable();
    assert_eq!(found, documented);
    for id in found {
        assert!(report::explain(id).unwrap().starts_with(id));
    }
}

/// Pointers to every value inside of `value` that holds no others.
fn leaves(value: &Value, place: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let name = name.replace('~', "~0").replace('/', "~1");
                leaves(value, &format!("{place}/{name}"), found);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                leaves(value, &format!("{place}/{index}"), found);
            }
        }
        _ => found.push(place.to_owned()),
    }
}

#[test]
fn nonsense_in_facts_is_judged_or_refused_and_ends_nothing() {
    let mut facts = healthy();
    on_cuda(&mut facts, true);
    facts.gpu = serde_json::from_str(include_str!("gpu/data/healthy.json")).unwrap();
    let on_gpu = serde_json::to_value(&facts).unwrap();
    let on_cpu = serde_json::to_value(healthy()).unwrap();
    let mut judged = 0;
    for good in [on_cpu, on_gpu] {
        let mut pointers = Vec::new();
        leaves(&good, "", &mut pointers);
        for pointer in pointers {
            for nonsense in [
                json!(0),
                json!(u32::MAX),
                json!(u64::MAX),
                json!(1e300),
                json!(-1),
                json!(""),
                json!("\u{1b}[2J\n\n,,.:/"),
                json!(null),
                json!([]),
            ] {
                let mut facts = good.clone();
                *facts.pointer_mut(&pointer).unwrap() = nonsense;
                // What is of another form is refused, and never judged.
                let Ok(facts) = serde_json::from_value::<Facts>(facts) else {
                    continue;
                };
                let report = Report::new(checks::run(&facts));
                assert!(!report.to_text().is_empty() && !report.to_json().is_empty());
                judged += 1;
            }
        }
    }
    assert!(judged > 500, "only {judged} were judged");
}
