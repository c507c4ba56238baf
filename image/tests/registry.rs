//! Pushing and pulling, against a registry in memory; `OUTRIDER_REGISTRY=127.0.0.1:5000` names a real one for the round trip.

mod support;

use std::fs;
use std::time::Duration;

use outrider_image::Error;
use outrider_image::build::Built;
use outrider_image::registry::{
    Client, Credentials, Outcome, PushOptions, Pushed, Reference, Retry, pull, push,
};
use support::registry::StandIn;
use support::{Repository, WEIGHTS_BYTES, WEIGHTS_PATH};

const RETRY: Retry = Retry {
    attempts: 3,
    first_wait: Duration::from_millis(1),
};

fn client(address: &str, rest: &str) -> Client {
    let reference: Reference = format!("{address}/{rest}").parse().unwrap();
    Client::new(&reference, None, false, RETRY)
}

fn options() -> PushOptions {
    PushOptions {
        chunk_bytes: 300_000,
        ..PushOptions::default()
    }
}

fn push_built(client: &Client, built: &Built, options: &PushOptions) -> Result<Pushed, Error> {
    let image = built.layout.image(None).unwrap();
    push(client, &built.layout, &image, options, &mut |_, _, _| {})
}

fn outcomes(pushed: &Pushed) -> Vec<Outcome> {
    pushed.blobs.iter().map(|(_, outcome)| *outcome).collect()
}

#[test]
fn an_image_comes_back_as_it_was_pushed() {
    let stand_in = StandIn::start();
    let address = std::env::var("OUTRIDER_REGISTRY").unwrap_or(stand_in.address);
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    let digest = built.manifest.digest().to_string();
    let name = format!("app-{}", &digest[7..15]);
    let pushed = push_built(&client(&address, &format!("{name}:v1")), &built, &options()).unwrap();
    assert_eq!(pushed.name, format!("{address}/{name}@{digest}"));
    for rest in [format!("{name}:v1"), format!("{name}@{digest}")] {
        let pulled = pull(&client(&address, &rest), &repository.path("pulled")).unwrap();
        let image = pulled.image(None).unwrap();
        assert_eq!(image.descriptor.digest(), built.manifest.digest());
        for (_, layer) in &built.layers {
            let [here, there] =
                [&built.layout, &pulled].map(|it| fs::read(it.blob_path(layer).unwrap()).unwrap());
            assert!(here == there, "{}", layer.digest());
        }
    }
    // A second push has nothing to send, and a version with another configuration next to nothing.
    let again = push_built(&client(&address, &format!("{name}:v1")), &built, &options()).unwrap();
    assert!(
        outcomes(&again).iter().all(|it| *it == Outcome::Exists),
        "{again:?}"
    );
    let mut second = Repository::new();
    second
        .definition
        .config
        .labels
        .insert("v".to_owned(), "2".to_owned());
    let second = second.build("image").unwrap();
    let next = push_built(
        &client(&address, &format!("{name}:v2")),
        &second,
        &options(),
    )
    .unwrap();
    let sent: u64 = outcomes(&next)
        .iter()
        .map(|it| match it {
            Outcome::Sent(bytes) => *bytes,
            _ => 0,
        })
        .sum();
    assert!(
        (1..5000).contains(&sent),
        "{sent} bytes were sent for a label"
    );
    // Another repository gets the blobs without sending them.
    let mounted = push_built(
        &client(&address, &format!("{name}-b:v1")),
        &built,
        &PushOptions {
            mount_from: vec!["nothing-here".to_owned(), name.clone()],
            ..options()
        },
    )
    .unwrap();
    assert!(
        outcomes(&mounted).iter().all(|it| *it == Outcome::Mounted),
        "{mounted:?}"
    );
}

#[test]
fn weights_that_are_not_stored_are_pushed_from_their_files() {
    let stand_in = StandIn::start();
    let repository = Repository::new();
    let stored = repository.build("stored").unwrap();
    let built = repository
        .build_with("bare", |options| options.store_weights = false)
        .unwrap();
    assert_eq!(built.manifest, stored.manifest);
    let weights = &built.layers[2].1;
    assert!(!built.layout.blob_path(weights).unwrap().exists());
    // Every part of the layer can be where an upload goes on: headers, file, filling.
    let whole = fs::read(stored.layout.blob_path(weights).unwrap()).unwrap();
    for offset in [
        0,
        1,
        511,
        2560,
        2561,
        700_000,
        whole.len() - 1024,
        whole.len() - 1,
    ] {
        let mut rest = Vec::new();
        let mut reader = built.layout.read_at(weights, offset as u64).unwrap();
        std::io::Read::read_to_end(&mut reader, &mut rest).unwrap();
        assert!(rest == whole[offset..], "from {offset} on");
    }
    push_built(&client(&stand_in.address, "app:v1"), &built, &options()).unwrap();
    let pulled = pull(
        &client(&stand_in.address, "app:v1"),
        &repository.path("pulled"),
    )
    .unwrap();
    let pulled = fs::read(pulled.blob_path(weights).unwrap()).unwrap();
    assert!(pulled == whole);
}

#[test]
fn nothing_is_sent_of_an_image_that_lacks_a_layer() {
    let stand_in = StandIn::start();
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    fs::remove_file(built.layout.blob_path(&built.layers[2].1).unwrap()).unwrap();
    let message = push_built(&client(&stand_in.address, "app:v1"), &built, &options())
        .unwrap_err()
        .chain();
    assert!(
        message.contains(WEIGHTS_PATH) && message.contains("is not in the layout"),
        "{message}"
    );
    assert_eq!(stand_in.state.lock().unwrap().taken_bytes, 0);
}

#[test]
fn the_manifest_comes_after_every_blob() {
    let stand_in = StandIn::start();
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    push_built(&client(&stand_in.address, "app:v1"), &built, &options()).unwrap();
    let state = stand_in.state.lock().unwrap();
    let manifest = state
        .asked
        .iter()
        .position(|it| it == "PUT /v2/app/manifests/v1")
        .unwrap();
    let last_blob = state
        .asked
        .iter()
        .rposition(|it| it.contains("/blobs/"))
        .unwrap();
    assert!(last_blob < manifest, "{:#?}", state.asked);
    assert_eq!(state.asked.last().unwrap(), "GET /v2/app/manifests/v1");
}

#[test]
fn an_upload_that_breaks_goes_on_where_it_stopped() {
    let stand_in = StandIn::start();
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    let total: u64 = built.layers.iter().map(|(_, layer)| layer.size()).sum();
    let client = client(&stand_in.address, "app:v1");
    let mut is_broken = false;
    let image = built.layout.image(None).unwrap();
    let state = stand_in.state.clone();
    push(
        &client,
        &built.layout,
        &image,
        &options(),
        &mut |what, bytes, _| {
            if what.contains(WEIGHTS_PATH) && bytes == 300_000 && !is_broken {
                is_broken = true;
                state.lock().unwrap().break_upload_at = Some(200_000);
            }
        },
    )
    .unwrap();
    assert!(is_broken);
    let state = stand_in.state.lock().unwrap();
    let extra = state.taken_bytes - total;
    // Configuration and manifest come on top; what the broken request brought isn't sent again.
    assert!(
        extra < 10_000,
        "{extra} bytes more than the layers were sent"
    );
}

#[test]
fn a_push_that_was_ended_is_taken_up_by_the_next() {
    let stand_in = StandIn::start();
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    let options = PushOptions {
        sessions: Some(repository.path("uploads.json")),
        ..options()
    };
    let image = built.layout.image(None).unwrap();
    let state = stand_in.state.clone();
    let first = push(
        &client(&stand_in.address, "app:v1"),
        &built.layout,
        &image,
        &options,
        &mut |what, bytes, _| {
            if what.contains(WEIGHTS_PATH) && bytes == 600_000 {
                state.lock().unwrap().is_read_only = true;
            }
        },
    );
    let message = first.unwrap_err().to_string();
    assert!(
        message.contains(WEIGHTS_PATH) && message.contains("503"),
        "{message}"
    );
    state.lock().unwrap().is_read_only = false;
    let before = state.lock().unwrap().taken_bytes;
    push_built(&client(&stand_in.address, "app:v1"), &built, &options).unwrap();
    let sent = state.lock().unwrap().taken_bytes - before;
    assert!(
        sent < WEIGHTS_BYTES as u64 - 600_000 + 10_000,
        "{sent} bytes were sent again"
    );
}

#[test]
fn a_download_that_breaks_goes_on_where_it_stopped() {
    let stand_in = StandIn::start();
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    push_built(&client(&stand_in.address, "app:v1"), &built, &options()).unwrap();
    stand_in.state.lock().unwrap().break_download_at = Some(100);
    let pulled = pull(
        &client(&stand_in.address, "app:v1"),
        &repository.path("pulled"),
    )
    .unwrap();
    assert_eq!(
        pulled.image(None).unwrap().descriptor.digest(),
        built.manifest.digest()
    );
}

#[test]
fn damage_is_refused_at_push_and_pull_and_names_the_file() {
    let stand_in = StandIn::start();
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    let weights = built.layout.blob_path(&built.layers[2].1).unwrap();
    let intact = fs::read(&weights).unwrap();
    let mut damaged = intact.clone();
    damaged[5000] ^= 1;
    fs::write(&weights, &damaged).unwrap();
    let message = push_built(&client(&stand_in.address, "app:v1"), &built, &options())
        .unwrap_err()
        .chain();
    assert!(
        message.contains(WEIGHTS_PATH) && message.contains("DIGEST_INVALID"),
        "{message}"
    );
    fs::write(&weights, &intact).unwrap();
    push_built(&client(&stand_in.address, "app:v1"), &built, &options()).unwrap();
    let digest = built.layers[2].1.digest().to_string();
    let key = ("app".to_owned(), digest.clone());
    stand_in.state.lock().unwrap().blobs.insert(digest, damaged);
    let message = pull(
        &client(&stand_in.address, "app:v1"),
        &repository.path("pulled"),
    )
    .unwrap_err()
    .chain();
    assert!(
        message.contains(WEIGHTS_PATH) && message.contains("is damaged"),
        "{message}"
    );
    assert!(!repository.path("pulled").exists());
    stand_in.state.lock().unwrap().links.remove(&key);
    let message = pull(
        &client(&stand_in.address, "app:v1"),
        &repository.path("pulled"),
    )
    .unwrap_err()
    .chain();
    assert!(
        message.contains(WEIGHTS_PATH) && message.contains("404"),
        "{message}"
    );
}

#[test]
fn a_manifest_of_another_digest_is_refused() {
    let stand_in = StandIn::start();
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    push_built(&client(&stand_in.address, "app:v1"), &built, &options()).unwrap();
    let digest = format!("sha256:{}", "0".repeat(64));
    {
        let mut state = stand_in.state.lock().unwrap();
        let manifest = state.manifests["app/v1"].clone();
        state.manifests.insert(format!("app/{digest}"), manifest);
    }
    let message = pull(
        &client(&stand_in.address, &format!("app@{digest}")),
        &repository.path("pulled"),
    )
    .unwrap_err()
    .chain();
    assert!(
        message.contains(&digest) && message.contains(&built.manifest.digest().to_string()),
        "{message}"
    );
}

#[test]
fn only_callers_with_credentials_get_a_token() {
    let stand_in = StandIn::start();
    stand_in.state.lock().unwrap().token = Some("t0ken".to_owned());
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    let reference: Reference = format!("{}/app:v1", stand_in.address).parse().unwrap();
    let message = push_built(
        &Client::new(&reference, None, false, RETRY),
        &built,
        &options(),
    )
    .unwrap_err()
    .chain();
    assert!(message.contains("gives no token"), "{message}");
    let credentials = Credentials {
        user: "u".to_owned(),
        secret: "p".to_owned(),
    };
    push_built(
        &Client::new(&reference, Some(credentials), false, RETRY),
        &built,
        &options(),
    )
    .unwrap();
}
