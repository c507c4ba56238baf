//! What must hold after a rollout of the drill, and the table of it.

use std::collections::{BTreeMap, BTreeSet};

use outrider_rollout::machine::{Event, Phase, Record, State};

use super::callers::{CALLERS, Outcome, Request};

/// Most time from a verdict to a gateway that sends nobody to the canary.
const MOST_ROLLBACK_MS: u64 = 5000;
/// Deviations that a measured share may be away from the asked one.
const DEVIATIONS: f64 = 4.0;

/// How a rollout must end.
#[derive(Clone, Copy, Debug)]
pub enum Expected {
    /// At 100 %, with nobody harmed.
    Complete,
    /// At 0 %, from this phase on and for a cause with these words.
    RolledBack {
        /// Where it must stop.
        at: Phase,
        /// In its cause.
        cause: &'static str,
        /// Whether callers of the canary may have met errors.
        harms_canary: bool,
    },
}

/// A rollout of the drill.
pub struct Run {
    /// Its name.
    pub name: &'static str,
    /// How it must end.
    pub expected: Expected,
    /// How it ended.
    pub state: State,
    /// Every decision.
    pub journal: Vec<Record>,
    /// Every request.
    pub requests: Vec<Request>,
    /// Share that the gateway has at the end; nothing where its parts do not agree.
    pub share: Option<u8>,
    /// The plan's shares.
    pub steps: Vec<u8>,
    /// Times that it was killed and resumed.
    pub kills: usize,
    /// Time from the beginning to the end.
    pub seconds: f64,
}

impl Run {
    /// What does not hold.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut must = |holds: bool, text: String| {
            if !holds {
                faults.push(text);
            }
        };
        let stable: Vec<_> = self.harmed(false).collect();
        must(
            stable.is_empty(),
            format!("callers of stable were harmed: {}", examples(&stable)),
        );
        let canary: Vec<_> = self.harmed(true).collect();
        let may_harm = matches!(
            self.expected,
            Expected::RolledBack {
                harms_canary: true,
                ..
            }
        );
        must(
            may_harm || canary.is_empty(),
            format!("callers of the canary were harmed: {}", examples(&canary)),
        );
        let wrong = |request: &&Request| matches!(request.outcome, Outcome::Wrong(_));
        let wrong: Vec<_> = self.requests.iter().filter(wrong).collect();
        must(
            wrong.is_empty(),
            format!("wrong answers: {}", examples(&wrong)),
        );
        let numbers = self.journal.iter().map(|record| record.seq);
        must(
            numbers.eq(1..=self.journal.len() as u64),
            "the journal has a gap or a line twice".to_owned(),
        );
        let share = if self.state.phase == Phase::Complete {
            100
        } else {
            0
        };
        must(
            self.share == Some(share),
            format!("the gateway has {:?}, and must have {share} %", self.share),
        );
        match self.expected {
            Expected::Complete => self.check_complete(&mut must),
            Expected::RolledBack { at, cause, .. } => self.check_rollback(at, cause, &mut must),
        }
        faults
    }

    fn check_complete(&self, must: &mut impl FnMut(bool, String)) {
        let ended = (self.state.phase, self.state.cause.as_deref());
        must(
            self.state.phase == Phase::Complete,
            format!("it ended as {ended:?}"),
        );
        let mut phases = vec![Phase::Start, Phase::Smoke, Phase::Verify];
        phases.extend((0..self.steps.len()).map(Phase::Step));
        phases.extend([Phase::Retire, Phase::Complete]);
        let entered = self.journal.iter();
        let entered = entered.filter(|record| record.event == Event::Entered);
        let entered: Vec<_> = entered.map(|record| record.phase).collect();
        must(
            entered == phases,
            format!("steps were skipped or doubled: {entered:?}"),
        );
        let mut on_canary = BTreeSet::new();
        let back = self.requests.iter().find(|request| {
            match request.version.as_deref() {
                Some("canary") => on_canary.insert(request.caller),
                _ => return on_canary.contains(&request.caller),
            };
            false
        });
        must(back.is_none(), format!("a caller moved back: {back:?}"));
        for (percent, asked, canary) in self.splits() {
            let share = f64::from(percent) / 100.0;
            let expected = share * asked as f64;
            // Which callers are the canary's is one sample, which of them ask is another.
            let variance = share * (1.0 - share);
            let deviation = (variance * (1.0 / asked as f64 + 1.0 / CALLERS as f64)).sqrt();
            let distance = (canary as f64 - expected).abs() / asked as f64;
            must(
                asked > 0 && distance <= DEVIATIONS * deviation,
                format!("{canary} of {asked} requests at {percent} %"),
            );
        }
    }

    fn check_rollback(&self, at: Phase, cause: &str, must: &mut impl FnMut(bool, String)) {
        let found = self.state.cause.clone().unwrap_or_default();
        must(
            self.state.phase == Phase::RolledBack && found.contains(cause),
            format!(
                "it ended as {:?} for {found:?}, not for {cause}",
                self.state.phase
            ),
        );
        let stopped = self.stopped_at();
        must(
            stopped == Some(at),
            format!("it stopped at {stopped:?}, not at {at:?}"),
        );
        if !self.state.gateway_moved {
            let moved = self.on_canary();
            must(
                moved == 0,
                format!("{moved} requests went to a canary that never had a share"),
            );
            return;
        }
        let took_ms = self.rollback_ms();
        must(
            took_ms.is_some_and(|took_ms| took_ms <= MOST_ROLLBACK_MS),
            format!("from the verdict to the gateway: {took_ms:?} ms"),
        );
        let confirmed = self.time_of(Event::Confirmed, Phase::RollBack);
        let late = self.requests.iter().find(|request| {
            confirmed.is_some_and(|confirmed| request.began_ms > confirmed)
                && request.version.as_deref() == Some("canary")
        });
        must(
            late.is_none(),
            format!("the canary answered after the rollback: {late:?}"),
        );
    }

    fn time_of(&self, event: Event, phase: Phase) -> Option<u64> {
        let record = self.journal.iter();
        let mut record = record.filter(|record| (record.event, record.phase) == (event, phase));
        Some(record.next()?.time_ms)
    }

    fn stopped_at(&self) -> Option<Phase> {
        let at = self
            .journal
            .iter()
            .position(|record| record.phase == Phase::RollBack)?;
        Some(self.journal[at - 1].phase)
    }

    fn rollback_ms(&self) -> Option<u64> {
        let verdict = self.time_of(Event::Entered, Phase::RollBack)?;
        Some(self.time_of(Event::Confirmed, Phase::RollBack)? - verdict)
    }

    fn on_canary(&self) -> usize {
        let canary = |request: &&Request| request.version.as_deref() == Some("canary");
        self.requests.iter().filter(canary).count()
    }

    /// Requests that did not get their whole and right answer, of the canary or of anybody else.
    fn harmed(&self, of_canary: bool) -> impl Iterator<Item = &Request> {
        self.requests.iter().filter(move |request| {
            request.outcome != Outcome::Whole
                && (request.version.as_deref() == Some("canary")) == of_canary
        })
    }

    /// For each step its share, the requests that began in it, and those of them that the canary answered.
    pub fn splits(&self) -> Vec<(u8, usize, usize)> {
        let steps = self.steps.iter().enumerate();
        let steps = steps.filter_map(|(index, &percent)| {
            let from = self.time_of(Event::Confirmed, Phase::Step(index))?;
            let next = self
                .journal
                .iter()
                .find(|record| record.time_ms > from && record.event == Event::Entered)?;
            let within = |request: &&Request| (from..next.time_ms).contains(&request.began_ms);
            let within = self.requests.iter().filter(within);
            let canary = |request: &&Request| request.version.as_deref() == Some("canary");
            Some((
                percent,
                within.clone().count(),
                within.filter(canary).count(),
            ))
        });
        steps.collect()
    }

    /// One line of the table.
    fn line(&self) -> [String; 9] {
        let end = match self.state.phase {
            Phase::Complete => "100 %".to_owned(),
            Phase::RolledBack => "rolled back".to_owned(),
            phase => format!("{phase:?}"),
        };
        let stopped = match self.stopped_at() {
            None => "-".to_owned(),
            Some(Phase::Step(index)) => format!("{} %", self.steps[index]),
            Some(phase) => format!("{phase:?}").to_lowercase(),
        };
        let to_stable = match self.rollback_ms() {
            Some(ms) if self.state.gateway_moved => format!("{ms} ms"),
            _ => "-".to_owned(),
        };
        [
            self.name.to_owned(),
            end,
            stopped,
            to_stable,
            self.requests.len().to_string(),
            self.on_canary().to_string(),
            self.harmed(false).count().to_string(),
            self.harmed(true).count().to_string(),
            format!("{:.0} s", self.seconds),
        ]
    }
}

fn examples(requests: &[&Request]) -> String {
    let some: Vec<_> = requests
        .iter()
        .take(3)
        .map(|request| format!("{request:?}"))
        .collect();
    format!("{} of them, such as {}", requests.len(), some.join(", "))
}

/// The table of all rollouts.
pub fn table(runs: &[Run]) -> String {
    let head = [
        "rollout",
        "ended",
        "stopped at",
        "back within",
        "requests",
        "on canary",
        "harmed on stable",
        "on canary",
        "time",
    ];
    let mut lines = vec![head.map(str::to_owned)];
    lines.extend(runs.iter().map(Run::line));
    let mut text = String::new();
    for line in &lines {
        for (column, cell) in line.iter().enumerate() {
            let cells = lines.iter().map(|line| line[column].chars().count());
            let width = cells.max().unwrap_or(0);
            text += &format!("{cell:<width$}  ");
        }
        text = text.trim_end().to_owned() + "\n";
    }
    text
}

/// The measured shares of a rollout that went to its end.
pub fn shares(run: &Run) -> String {
    let splits = run.splits();
    let splits: BTreeMap<_, _> = splits
        .into_iter()
        .map(|(percent, asked, canary)| (percent, (asked, canary)))
        .collect();
    let text = splits.iter().map(|(percent, (asked, canary))| {
        let measured = 100.0 * *canary as f64 / (*asked).max(1) as f64;
        format!("{percent} %: {canary} of {asked} ({measured:.1} %)")
    });
    text.collect::<Vec<_>>().join(", ")
}
