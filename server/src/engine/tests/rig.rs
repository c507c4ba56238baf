//! An engine over a fake target whose passes are noted and can be held up, with a clock that only the test moves.

use std::sync::{Mutex, OnceLock};

use super::*;

/// A clock that stands still until a test moves it.
#[derive(Clone)]
pub struct Hands {
    start: Instant,
    passed: Arc<Mutex<Duration>>,
}

impl Hands {
    fn new() -> Self {
        Self {
            start: Instant::now(),
            passed: Arc::default(),
        }
    }

    pub fn pass(&self, time: Duration) {
        *lock(&self.passed) += time;
    }

    pub fn now(&self) -> Instant {
        self.start + *lock(&self.passed)
    }

    fn clock(&self) -> Clock {
        let hands = self.clone();
        Clock::new(move || hands.now())
    }
}

/// What one sequence fed in a pass of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fed {
    pub start: usize,
    pub first: u32,
    pub count: usize,
}

/// The sequences of one pass that fed something.
type Pass = Vec<Fed>;

/// A target that waits for leave before every pass that feeds this token first.
pub const GATED: u32 = 50;

/// An engine whose passes are noted, over a target that stops at [`GATED`].
pub struct Rig {
    pub handle: EngineHandle,
    thread: JoinHandle<()>,
    pub passes: Arc<Mutex<Vec<Pass>>>,
    leave: mpsc::Sender<()>,
    pub hands: Hands,
    pub recorded: PrometheusHandle,
}

pub const SECOND: Duration = Duration::from_secs(1);

impl Rig {
    /// `tick` passes with every pass of the target.
    pub fn start(slots: usize, options: EngineOptions, tick: Duration) -> Self {
        let draft = Draft::Unavailable("none".to_owned());
        Self::over(FakeTarget::new(slots, 4096), draft, options, tick)
    }

    pub fn over(target: FakeTarget, draft: Draft, options: EngineOptions, tick: Duration) -> Self {
        let hands = Hands::new();
        let (leave, gate) = mpsc::channel();
        let passes = Arc::new(Mutex::new(Vec::new()));
        // The probe's passes are none of the engine's.
        let ready = Arc::new(OnceLock::new());
        let target = {
            let (passes, hands, ready) = (Arc::clone(&passes), hands.clone(), Arc::clone(&ready));
            target.before(move |batch| {
                let rows = batch.rows.iter().filter_map(|row| {
                    Some(Fed {
                        start: row.start,
                        first: *row.tokens.first()?,
                        count: row.tokens.len(),
                    })
                });
                let pass: Pass = rows.collect();
                let is_gated = |fed: &Fed| fed.start == 0 && fed.first == GATED;
                if ready.get().is_some() {
                    lock(&passes).push(pass.clone());
                    hands.pass(tick);
                    if pass.iter().any(is_gated) {
                        let _ = gate.recv();
                    }
                }
                Ok(())
            })
        };
        let options = EngineOptions {
            clock: hands.clock(),
            ..options
        };
        let (handle, thread, recorded) = start_recorded(target, draft, options, EOS);
        ready.get_or_init(|| ());
        Self {
            handle,
            thread,
            passes,
            leave,
            hands,
            recorded,
        }
    }

    pub fn request(&self, caller: &str, prompt: &[u32], max_tokens: usize) -> Request {
        Request {
            caller: caller.into(),
            arrived: self.hands.now(),
            ignore_eos: true,
            ..request(prompt, max_tokens)
        }
    }

    pub fn submit(
        &self,
        caller: &str,
        prompt: &[u32],
        max_tokens: usize,
    ) -> Result<UnboundedReceiver<Event>, SubmitError> {
        self.handle.submit(self.request(caller, prompt, max_tokens))
    }

    /// Stops the engine in a pass, so that what is submitted meanwhile waits.
    pub fn stop_at_a_pass(&self) -> UnboundedReceiver<Event> {
        let before = lock(&self.passes).len();
        let gated = self.submit("gate", &[GATED], 1).expect("fits");
        wait_until(|| lock(&self.passes).len() > before);
        gated
    }

    pub fn go_on(&self) {
        self.leave.send(()).expect("the pass waits");
    }

    /// First tokens of the prompts that were begun, in this order.
    pub fn begun(&self) -> Vec<u32> {
        let passes = lock(&self.passes);
        let rows = passes.iter().flatten();
        rows.filter(|fed| fed.start == 0 && fed.first != GATED)
            .map(|fed| fed.first)
            .collect()
    }

    pub fn end(self) {
        self.handle.drain();
        self.thread.join().expect("the engine ends");
    }
}
