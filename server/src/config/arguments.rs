//! The part of a command line that says where the configuration is: the same for the server and for what judges its configuration.

use std::path::PathBuf;

use super::Sources;

/// Arguments that name the layers of a configuration, to be flattened into those of a program.
#[derive(Debug, clap::Args)]
pub struct ConfigArguments {
    /// YAML file with the configuration; environment variables override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of the bundle to serve; sets serving.bundle
    #[arg(long, value_name = "DIR")]
    pub bundle: Option<String>,
    /// Address of the OpenAI-compatible interface; sets serving.listen
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// Address of /livez, /readyz and /metrics, or unix: and the path of a socket; sets serving.admin_listen
    #[arg(long, value_name = "ADDRESS")]
    pub admin_listen: Option<String>,
    /// Sets any configuration key, for example serving.runtime.max_concurrency=4; may be repeated, a later one wins
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_and_value)]
    pub settings: Vec<(String, String)>,
}

fn key_and_value(text: &str) -> Result<(String, String), String> {
    text.split_once('=')
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .ok_or_else(|| "must be a key, `=` and a value".to_owned())
}

impl ConfigArguments {
    /// These arguments, with the environment of this process between the file and the flags.
    pub fn sources(self) -> Sources {
        let named = [
            ("serving.bundle", self.bundle),
            ("serving.listen", self.listen),
            ("serving.admin_listen", self.admin_listen),
        ];
        let named = named
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Sources {
            file: self.config,
            // Values that are not text cannot be part of a key this server knows; the rest of the environment is not ours.
            environment: std::env::vars_os()
                .filter_map(|(name, value)| {
                    Some((name.into_string().ok()?, value.into_string().ok()?))
                })
                .collect(),
            flags: self.settings.into_iter().chain(named).collect(),
        }
    }
}
