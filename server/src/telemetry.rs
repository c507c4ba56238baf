//! Spans for a collector: OTLP over HTTP, from a thread of their own.
//!
//! A collector that is slow, full or gone costs spans, never a request: those that find no room in the queue are dropped, and a failure is
//! logged once a minute.
//! Spans say who asked, how long each part took and how many tokens there were; prompts and completions are never part of them.

use std::fmt;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{
    ExporterBuildError, Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use tracing::Subscriber;
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::registry::LookupSpan;

/// Name of the service in every span.
const SERVICE: &str = "outrider-server";

/// How long the collector may take for one batch.
const EXPORT_LIMIT: Duration = Duration::from_secs(5);

/// How long the last spans may take when the server ends.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// Least time between two records of failures in the log.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Spans can't be exported.
#[derive(Debug, thiserror::Error)]
#[error("cannot export spans to {endpoint} (serving.telemetry.otlp_endpoint): {source}")]
pub struct TelemetryError {
    endpoint: String,
    source: ExporterBuildError,
}

/// What sends spans to a collector.
#[derive(Clone, Debug)]
pub struct Telemetry {
    provider: SdkTracerProvider,
}

impl Telemetry {
    /// Starts the thread that sends; it connects when there is something to send.
    ///
    /// # Errors
    ///
    /// The endpoint is no URL.
    pub fn start(endpoint: &str) -> Result<Self, TelemetryError> {
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Client::new())
            .with_endpoint(endpoint)
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(EXPORT_LIMIT)
            .build()
            .map_err(|source| TelemetryError {
                endpoint: endpoint.to_owned(),
                source,
            })?;
        let resource = Resource::builder_empty()
            .with_service_name(SERVICE)
            .with_attribute(opentelemetry::KeyValue::new(
                "service.version",
                env!("CARGO_PKG_VERSION"),
            ))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            // Who calls decides for a trace that began there.
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)))
            .with_resource(resource)
            .build();
        Ok(Self { provider })
    }

    /// Makes spans of `tracing` into spans to send.
    pub fn layer<S>(&self) -> OpenTelemetryLayer<S, SdkTracer>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer(SERVICE))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
    }

    /// Sends the spans that wait and ends. Blocks until that is done, or for two seconds.
    pub fn end(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(LAST_SPANS) {
            tracing::warn!(%error, "the last spans could not be exported");
        }
    }
}

/// The span that a caller named as the parent of its request, in the two headers of the W3C trace context.
pub fn parent(traceparent: Option<&str>, tracestate: Option<&str>) -> Context {
    struct Headers<'a>(Option<&'a str>, Option<&'a str>);

    impl Extractor for Headers<'_> {
        fn get(&self, key: &str) -> Option<&str> {
            match key {
                "traceparent" => self.0,
                "tracestate" => self.1,
                _ => None,
            }
        }

        fn keys(&self) -> Vec<&str> {
            vec!["traceparent", "tracestate"]
        }
    }

    TraceContextPropagator::new().extract(&Headers(traceparent, tracestate))
}

/// Sends with ureq, which blocks; the thread of the batch processor has nothing else to do.
struct Client {
    agent: ureq::Agent,
    failures: Mutex<Failures>,
}

/// Failures since the last record in the log.
#[derive(Default)]
struct Failures {
    unlogged: u64,
    logged: Option<Instant>,
}

impl Client {
    fn new() -> Self {
        Self {
            agent: ureq::Agent::config_builder()
                .http_status_as_error(false)
                .timeout_global(Some(EXPORT_LIMIT))
                .build()
                .into(),
            failures: Mutex::default(),
        }
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let answer = self.agent.run(request.map(|body| body.to_vec()));
        let answer = answer.inspect_err(|error| self.failed(error))?;
        if !answer.status().is_success() {
            self.failed(&format_args!("the collector answered {}", answer.status()));
        }
        let (head, mut body) = answer.into_parts();
        let body = body.read_to_vec()?;
        Ok(Response::from_parts(head, body.into()))
    }

    fn failed(&self, error: &dyn fmt::Display) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.unlogged += 1;
        if failures
            .logged
            .is_none_or(|logged| logged.elapsed() >= FAILURE_LOG_INTERVAL)
        {
            tracing::warn!(%error, failures = failures.unlogged, "spans could not be exported");
            *failures = Failures {
                unlogged: 0,
                logged: Some(Instant::now()),
            };
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl HttpClient for Client {
    fn send_bytes<'client, 'sent>(
        &'client self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'sent>>
    where
        'client: 'sent,
        Self: 'sent,
    {
        Box::pin(async move { self.send(request) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use opentelemetry::trace::TraceContextExt as _;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn a_trace_context_is_taken_only_when_it_is_whole() {
        const WHOLE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let span = |value: Option<&'static str>| {
            let parent = parent(value, None);
            let span = parent.span().span_context().clone();
            span.is_valid().then(|| span.trace_id().to_string())
        };
        let trace = "0af7651916cd43dd8448eb211c80319c".to_owned();
        assert_eq!(span(Some(WHOLE)), Some(trace));
        for bad in [
            None,
            Some(""),
            Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"),
            Some("00-00000000000000000000000000000000-b7ad6b7169203331-01"),
            Some("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01"),
            Some("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            Some("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01"),
        ] {
            assert_eq!(span(bad), None, "{bad:?}");
        }
    }

    /// Counts records.
    struct Counter(Arc<AtomicUsize>);

    impl<S: Subscriber> tracing_subscriber::Layer<S> for Counter {
        fn on_event(
            &self,
            event: &tracing::Event<'_>,
            _: tracing_subscriber::layer::Context<'_, S>,
        ) {
            if event.metadata().target().starts_with("outrider") {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    #[test]
    fn a_collector_that_is_gone_is_told_once_in_a_while() {
        let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1/traces", gone.local_addr().unwrap());
        drop(gone);
        let records = Arc::new(AtomicUsize::new(0));
        let subscriber = tracing_subscriber::registry().with(Counter(records.clone()));
        tracing::subscriber::with_default(subscriber, || {
            let client = Client::new();
            let send = || {
                let request = Request::post(&url).body(Bytes::from_static(b"spans"));
                client.send(request.unwrap()).unwrap_err()
            };
            for _ in 0..3 {
                send();
            }
            assert_eq!(records.load(Ordering::SeqCst), 1);
            let failures = || client.failures.lock().unwrap();
            assert_eq!(failures().unlogged, 2);
            failures().logged = Instant::now().checked_sub(FAILURE_LOG_INTERVAL);
            send();
            assert_eq!(records.load(Ordering::SeqCst), 2);
            assert_eq!(failures().unlogged, 0);
        });
    }
}
