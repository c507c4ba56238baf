//! Requests without a valid key, counted and told in bulk, so that whoever sends them crowds no other caller out of the logs.
//!
//! Each address and path that asks has one record in the log and one line in the audit log for each interval, those of its last request with
//! the count of all. Beyond a bounded number of them the rest is told as one.
//! Metrics count every request by itself, elsewhere.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::audit::{self, AuditLog};

/// Pairs of address and path that are told apart in one interval.
const MAX_SOURCES: usize = 64;

/// What addresses are told as when there is no room to tell them apart.
const OTHERS: &str = "others";

/// What is known of one refused request.
#[derive(Debug)]
pub struct Refusal {
    /// Where it came from.
    pub address: String,
    /// The route.
    pub route: String,
    /// Its identifier, on the interface that has them.
    pub request_id: Option<String>,
    /// Its line of the audit log, where it is to have one.
    pub line: Option<audit::Record>,
}

/// Those that were not told yet.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<HashMap<(String, String), Counted>>);

#[derive(Debug)]
struct Counted {
    requests: u64,
    lines: u64,
    last: Refusal,
}

impl Refusals {
    /// Counts a request.
    pub fn add(&self, refusal: Refusal) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut source = (refusal.address.clone(), refusal.route.clone());
        if !waiting.contains_key(&source) && waiting.len() >= MAX_SOURCES {
            source = (OTHERS.to_owned(), OTHERS.to_owned());
        }
        let lines = u64::from(refusal.line.is_some());
        let counted = waiting.entry(source).or_insert_with(|| Counted {
            requests: 0,
            lines: 0,
            last: Refusal {
                address: String::new(),
                route: String::new(),
                request_id: None,
                line: None,
            },
        });
        counted.requests += 1;
        counted.lines += lines;
        // The rest may be told with requests that have no line among them.
        let line = refusal.line.or(counted.last.line.take());
        counted.last = Refusal { line, ..refusal };
    }

    /// Tells the log and the audit log of what was counted since the last call.
    pub fn tell(&self, audit: Option<&AuditLog>) {
        let waiting = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for ((address, route), counted) in waiting {
            tracing::warn!(
                address,
                route,
                requests = counted.requests,
                last_request_id = counted.last.request_id,
                "requests without a valid key were refused"
            );
            if let (Some(audit), Some(line)) = (audit, counted.last.line) {
                audit.write(audit::Record {
                    caller: address,
                    refused_requests: Some(counted.lines),
                    ..line
                });
            }
        }
    }
}
