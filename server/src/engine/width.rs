//! How many drafted tokens are worth checking: the width of the next step, from what steps cost and what was accepted lately.
//!
//! A step over `n` sequences commits `sum of expected tokens(width)` for the price of one target pass of that width and one draft pass.
//! Both prices are measured all the time, relative to each other, so that a machine that slows down as a whole changes nothing.
//! Width 1 is a plain step. The policy can only change speed: what is committed does not depend on the width.
//!
//! Two widths are tried first; the price of the others is taken from the line through those that are known, until one of them looks best and is tried.
//! Now and then another width than the best one is taken, so that the figures stay true.
//!
//! Where plain steps stay best, drafting rests: sequences that begin then do without it to their end, and so without the work of keeping a draft's context.
//! When it is time to learn again, one that begins is a scout, which drafts.
//! A scout whose prompt is there already, but not for the draft, has it fed again: so much of the time and no more goes into that.

/// Samples before a price counts as known.
const SAMPLES: u32 = 2;

/// Steps between two that are taken to learn.
const EXPLORATION_STEPS: u32 = 32;

/// The same where drafting has not paid for a while: each step that confirms it doubles the distance to the next.
const LONGEST_EXPLORATION_STEPS: u32 = 512;

/// The same while bad luck may be all that speaks against drafting.
const LONGEST_EXPLORATION_STEPS_IN_DOUBT: u32 = 128;

/// Steps in a row for which plain ones were best, after which drafting rests.
const STEPS_TO_REST: u32 = 64;

/// Running sequences for which there is one scout when it is time to learn.
const SEQUENCES_PER_SCOUT: usize = 8;

/// Share of the time that may go into feeding prompts again for scouts.
const SCOUTING_SHARE: f64 = 0.005;

/// Share by which the value of drafting must have risen since the last such step to count as a change.
const NOTICEABLE_RISE: f64 = 0.04;

/// Width that is tried first: wide enough to learn about acceptance, narrow enough to cost little.
const TRIAL_WIDTH: usize = 4;

/// Share by which a width must be better than plain steps to be taken: wide steps take longer, so that tokens come less evenly.
const LEAST_GAIN: f64 = 0.05;

/// Weight of a new sample of the overall speed.
const SCALE_WEIGHT: f64 = 0.2;

/// Weight of a new sample of a price.
const PRICE_WEIGHT: f64 = 0.1;

/// A sample above this multiple of what was expected counts as that: the machine was busy with something else.
const LARGEST_SURPRISE: f64 = 1.5;

/// What is left of an old observation of acceptance when a new one comes.
const MEMORY: f64 = 0.95;

/// Observations that the average over all sequences counts for in the estimate of one.
const PRIOR_TRIALS: f64 = 6.0;

/// Share of accepted tokens that is assumed before there is any observation.
const FIRST_GUESS: f64 = 0.5;

/// How often drafted tokens were accepted, by position behind the anchor.
#[derive(Clone, Debug, Default)]
pub(super) struct Acceptance {
    /// Accepted and tried, fading; position 1 first. A position is tried when all before it were accepted.
    positions: Vec<(f64, f64)>,
}

impl Acceptance {
    /// Takes in that `accepted` of `checked` drafted tokens were the target's choice.
    pub(super) fn record(&mut self, checked: usize, accepted: usize) {
        let tried = checked.min(accepted + 1);
        if self.positions.len() < tried {
            self.positions.resize(tried, (0.0, 0.0));
        }
        for (index, (successes, trials)) in self.positions[..tried].iter_mut().enumerate() {
            *successes = *successes * MEMORY + f64::from(u8::from(index < accepted));
            *trials = *trials * MEMORY + 1.0;
        }
    }

    /// Share accepted at a position, counted from 0, towards `prior` while there are few observations.
    fn rate(&self, index: usize, prior: f64) -> f64 {
        let (successes, trials) = self.positions.get(index).copied().unwrap_or_default();
        (successes + prior * PRIOR_TRIALS) / (trials + PRIOR_TRIALS)
    }

    /// The same with every share as high as one standard deviation of bad luck would have hidden.
    fn hopeful(&self) -> Self {
        let raised = |&(successes, trials): &(f64, f64)| {
            let share = (successes + 1.0) / (trials + 2.0);
            let luck = (trials * share * (1.0 - share)).sqrt();
            ((successes + luck).min(trials), trials)
        };
        Self {
            positions: self.positions.iter().map(raised).collect(),
        }
    }

    /// Tokens that a step of this width commits on average.
    fn expected_tokens(&self, overall: &Acceptance, width: usize) -> f64 {
        let (mut expected, mut reached) = (1.0, 1.0);
        let mut guess = FIRST_GUESS;
        for index in 0..width - 1 {
            // A position that was never reached is taken to be like the one before it.
            guess = overall.rate(index, guess);
            reached *= self.rate(index, guess);
            expected += reached;
        }
        expected
    }
}

/// What a pass costs, as a multiple of [`Prices::scale`].
#[derive(Clone, Copy, Debug, Default)]
struct Price {
    value: f64,
    samples: u32,
}

impl Price {
    fn is_known(&self) -> bool {
        self.samples >= SAMPLES
    }

    /// How many times as dear a sample is as was expected.
    fn surprise(&self, sample: f64) -> f64 {
        (sample / self.value).min(LARGEST_SURPRISE)
    }

    fn record(&mut self, sample: f64) {
        self.value = match self.samples {
            0 => sample,
            // The machine may have been busy with something else.
            1..SAMPLES => self.value.min(sample),
            // Factors, not differences: with those, the noise of a width that is always taken moves its price and the scale apart without end.
            SAMPLES.. => self.value * self.surprise(sample).powf(PRICE_WEIGHT),
        };
        self.samples = self.samples.saturating_add(1);
    }
}

/// Prices of steps over one number of slots.
#[derive(Clone, Debug)]
struct Prices {
    /// Time of a step of price 1, in seconds.
    scale: f64,
    /// Target passes by width, from width 0 on.
    widths: Vec<Price>,
    /// Draft passes.
    draft: Price,
    /// Steps since one was taken to learn.
    since_exploration: u32,
    /// Steps from that one to the next.
    exploration_steps: u32,
    /// Value of the best width above 1 when the last such step was taken, relative to plain steps.
    drafting_value: f64,
    /// Steps in a row for which a plain one was best.
    plain_steps: u32,
}

impl Prices {
    fn new(widest: usize) -> Self {
        Self {
            scale: 0.0,
            widths: vec![Price::default(); widest + 1],
            draft: Price::default(),
            since_exploration: 0,
            exploration_steps: EXPLORATION_STEPS,
            drafting_value: 0.0,
            plain_steps: 0,
        }
    }

    fn record_target(&mut self, width: usize, seconds: f64) {
        let Some(price) = self.widths.get_mut(width) else {
            return;
        };
        if self.scale == 0.0 {
            self.scale = seconds;
        }
        let mut sample = seconds / self.scale;
        if price.is_known() {
            let surprise = price.surprise(sample);
            let scale = surprise.powf(SCALE_WEIGHT);
            self.scale *= scale;
            sample = surprise * price.value / scale;
        }
        price.record(sample);
    }

    fn record_draft(&mut self, seconds: f64) {
        if self.scale > 0.0 {
            self.draft.record(seconds / self.scale);
        }
    }

    fn is_known(&self, width: usize) -> bool {
        self.widths[width].is_known()
    }

    /// Whether it is time to take a step to learn.
    fn are_due(&self) -> bool {
        self.since_exploration >= self.exploration_steps
    }

    /// Whether a plain step, one with drafted tokens and a draft pass have been measured.
    fn are_known(&self) -> bool {
        self.draft.is_known()
            && self.is_known(1)
            && (2..self.widths.len()).any(|width| self.is_known(width))
    }

    /// Whether plain steps were best of late, but not for long enough.
    fn are_open(&self) -> bool {
        (1..STEPS_TO_REST).contains(&self.plain_steps)
    }

    /// Price of a target pass, measured or from the line through the two nearest widths that were.
    fn target(&self, width: usize) -> f64 {
        if self.is_known(width) {
            return self.widths[width].value;
        }
        let known = |width: &usize| self.is_known(*width);
        let mut below = (1..width).rev().filter(known);
        let mut above = (width + 1..self.widths.len()).filter(known);
        let (first, second) = match (below.next(), above.next()) {
            (Some(first), Some(second)) => (first, second),
            (Some(second), None) => (below.next().unwrap_or(second), second),
            (None, Some(first)) => (first, above.next().unwrap_or(first)),
            (None, None) => return 1.0,
        };
        let (low, high) = (self.widths[first].value, self.widths[second].value);
        if first == second {
            return low;
        }
        let slope = (high - low) / (second as f64 - first as f64);
        // More rows never cost less.
        low + slope.max(0.0) * (width as f64 - first as f64)
    }

    /// Price of a whole step.
    fn step(&self, width: usize) -> f64 {
        let draft = if width > 1 { self.draft.value } else { 0.0 };
        self.target(width) + draft
    }
}

/// The sequences of a step.
#[derive(Debug, Default)]
pub(super) struct Members<'s> {
    /// Of each that can have drafted tokens, how often they were accepted.
    pub drafting: Vec<&'s Acceptance>,
    /// How many do without while drafting rests.
    pub resting: usize,
    /// How many take plain steps whatever happens.
    pub plain: usize,
}

/// Chooses the width of steps.
#[derive(Clone, Debug)]
pub(super) struct WidthPolicy {
    /// Whether it chooses; otherwise every step is as wide as possible.
    adaptive: bool,
    widest: usize,
    /// Prices by number of slots in a pass, from one slot on.
    prices: Vec<Prices>,
    /// Acceptance over all sequences.
    overall: Acceptance,
    /// What it costs to feed a token of a prompt.
    feed_seconds_per_token: f64,
    /// Time that went into feeding prompts again for scouts beyond their share.
    scouting_debt_seconds: f64,
}

impl WidthPolicy {
    /// For passes over up to `slots` slots with blocks of up to `widest` tokens.
    pub(super) fn new(adaptive: bool, slots: usize, widest: usize) -> Self {
        Self {
            adaptive,
            widest,
            prices: vec![Prices::new(widest); slots],
            overall: Acceptance::default(),
            feed_seconds_per_token: 0.0,
            scouting_debt_seconds: 0.0,
        }
    }

    /// A pass that fed so many tokens of a prompt took this long.
    pub(super) fn record_feed(&mut self, tokens: usize, seconds: f64) {
        let sample = seconds / tokens.max(1) as f64;
        self.feed_seconds_per_token += if self.feed_seconds_per_token == 0.0 {
            sample
        } else {
            PRICE_WEIGHT * (sample - self.feed_seconds_per_token)
        };
        self.pay(seconds);
    }

    /// A sequence over `slots` slots that begins is to draft, for which so many tokens of its prompt are fed again.
    pub(super) fn record_fed_again(&mut self, slots: usize, tokens: usize) {
        let is_scout = self
            .nearest(slots, Prices::are_known)
            .is_some_and(|prices| prices.plain_steps > 0);
        if is_scout {
            self.scouting_debt_seconds += tokens as f64 * self.feed_seconds_per_token;
        }
    }

    fn pay(&mut self, seconds: f64) {
        let debt = self.scouting_debt_seconds - SCOUTING_SHARE * seconds;
        self.scouting_debt_seconds = debt.max(0.0);
    }

    /// A target pass over `slots` slots with this many rows each took this long; one of no time says nothing.
    pub(super) fn record_target(&mut self, slots: usize, width: usize, seconds: f64) {
        self.pay(seconds);
        if let Some(prices) = self.prices.get_mut(slots - 1)
            && seconds > 0.0
        {
            prices.record_target(width, seconds);
        }
    }

    /// A draft pass over `slots` slots took this long; one of no time says nothing.
    pub(super) fn record_draft(&mut self, slots: usize, seconds: f64) {
        if let Some(prices) = self.prices.get_mut(slots - 1)
            && seconds > 0.0
        {
            prices.record_draft(seconds);
        }
    }

    /// Some sequence had `accepted` of `checked` drafted tokens accepted.
    pub(super) fn record_acceptance(&mut self, checked: usize, accepted: usize) {
        self.overall.record(checked, accepted);
    }

    /// Prices of the number of slots for which `holds` that is nearest to this one, and not twice as far.
    fn nearest(&self, slots: usize, holds: impl Fn(&Prices) -> bool) -> Option<&Prices> {
        let near = slots.div_ceil(2).max(1)..=2 * slots;
        near.filter_map(|count| Some((count, self.prices.get(count - 1)?)))
            .filter(|(_, prices)| holds(prices))
            .min_by_key(|(count, _)| count.abs_diff(slots))
            .map(|(_, prices)| prices)
    }

    /// Whether a sequence that begins beside `running` others, of which `drafting` draft, is to do without to its end.
    pub(super) fn lets_rest(&self, running: usize, drafting: usize) -> bool {
        let slots = running + 1;
        let scouts = slots.div_ceil(SEQUENCES_PER_SCOUT);
        let nearest = self.nearest(slots, |prices| prices.are_known() && !prices.are_open());
        // Of a number of slots that was never tried, steps count all the same: those over the nearest one may be long over.
        let own = self.prices.get(running);
        let waited_steps = own.map_or(0, |prices| prices.since_exploration);
        let rests = nearest.is_some_and(|prices| {
            let is_due = prices.are_due() || waited_steps >= prices.exploration_steps;
            let may_scout = is_due && self.scouting_debt_seconds == 0.0;
            prices.plain_steps > 0 && (drafting >= scouts || !may_scout)
        });
        self.adaptive && rests
    }

    /// Width of the next step over `slots` slots; 1 is a plain step.
    ///
    /// `reachable` is the widest block that a sequence has room for: a wider one can't be tried.
    pub(super) fn choose(&mut self, slots: usize, members: &Members, reachable: usize) -> usize {
        if !self.adaptive || self.widest <= 1 {
            return self.widest;
        }
        // What is known of about as many slots decides how soon it is worth trying this number.
        let nearest = self.nearest(slots, Prices::are_known);
        let patience = nearest
            .filter(|prices| prices.plain_steps > 0)
            .map_or(0, |prices| prices.exploration_steps);
        let Some(prices) = self.prices.get_mut(slots.saturating_sub(1)) else {
            return self.widest;
        };
        prices.since_exploration = prices.since_exploration.saturating_add(1);
        if members.drafting.is_empty() {
            return 1;
        }
        let reachable = reachable.clamp(1, self.widest);
        let trial = reachable.min(TRIAL_WIDTH);
        let untried = [trial, 1]
            .into_iter()
            .find(|&width| !prices.is_known(width))
            .or((!prices.draft.is_known()).then_some(trial));
        if let Some(width) = untried {
            if prices.since_exploration < patience {
                return 1;
            }
            prices.since_exploration = 0;
            return width;
        }
        let expected = |width| {
            let tokens = members
                .drafting
                .iter()
                .map(|acceptance| acceptance.expected_tokens(&self.overall, width));
            tokens.sum::<f64>() + members.plain as f64
        };
        // What this step would be worth, and what it would be if none rested.
        let worth = |width: usize| (expected(width) + members.resting as f64) / prices.step(width);
        let resting = Acceptance::default();
        let potential = |width: usize| {
            let of_one = resting.expected_tokens(&self.overall, width);
            (expected(width) + members.resting as f64 * of_one) / prices.step(width)
        };
        let best = best_gain(worth, reachable)
            .filter(|(_, gain)| *gain > 1.0 + LEAST_GAIN)
            .map_or(1, |(width, _)| width);
        let (promising, drafting_value) = best_gain(potential, reachable).unwrap_or((trial, 0.0));
        if drafting_value > 1.0 + LEAST_GAIN {
            prices.exploration_steps = EXPLORATION_STEPS;
            prices.plain_steps = 0;
        } else {
            prices.plain_steps = prices.plain_steps.saturating_add(1);
        }
        if !prices.are_due() {
            return best;
        }
        prices.since_exploration = 0;
        if best == 1 {
            let risen = drafting_value > prices.drafting_value * (1.0 + NOTICEABLE_RISE);
            let hopeful = self.overall.hopeful();
            let hope = |width: usize| {
                let of_one = resting.expected_tokens(&hopeful, width);
                let drafting = (members.drafting.len() + members.resting) as f64;
                (drafting * of_one + members.plain as f64) / prices.step(width)
            };
            let is_in_doubt =
                best_gain(hope, reachable).is_some_and(|(_, gain)| gain > 1.0 + LEAST_GAIN);
            let longest = if is_in_doubt {
                LONGEST_EXPLORATION_STEPS_IN_DOUBT
            } else {
                LONGEST_EXPLORATION_STEPS
            };
            prices.exploration_steps = if risen {
                EXPLORATION_STEPS
            } else {
                (2 * prices.exploration_steps).min(longest)
            };
            prices.drafting_value = drafting_value;
            return promising;
        }
        [1, best - 1, best + 1]
            .into_iter()
            .filter(|width| (1..=reachable).contains(width))
            .min_by_key(|&width| prices.widths[width].samples)
            .unwrap_or(best)
    }
}

/// The width above 1 that is worth most, relative to a plain step; `None` when there is no such width.
fn best_gain(worth: impl Fn(usize) -> f64, widest: usize) -> Option<(usize, f64)> {
    let plain = worth(1);
    (2..=widest)
        .map(|width| (width, worth(width) / plain))
        .max_by(|a, b| a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn alone(acceptance: &Acceptance) -> Members<'_> {
        Members {
            drafting: vec![acceptance],
            ..Members::default()
        }
    }

    /// A world with these prices, in which a drafted token is accepted with these chances by position.
    struct World {
        target: Vec<f64>,
        draft: f64,
        chances: Vec<f64>,
        state: u64,
    }

    impl World {
        fn random(&mut self) -> f64 {
            self.state = self
                .state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.state >> 11) as f64 / (1u64 << 53) as f64
        }

        fn accepted(&mut self, checked: usize) -> usize {
            (0..checked)
                .take_while(|&index| {
                    let chance = self.chances[index];
                    self.random() < chance
                })
                .count()
        }

        /// Tokens a second with this width for ever.
        fn rate(&self, width: usize) -> f64 {
            let (mut tokens, mut reached) = (1.0, 1.0);
            for chance in &self.chances[..width - 1] {
                reached *= chance;
                tokens += reached;
            }
            let draft = if width > 1 { self.draft } else { 0.0 };
            tokens / (self.target[width] + draft)
        }

        /// Tokens a second under a policy, and how often each width was taken.
        fn run(&mut self, policy: &mut WidthPolicy, steps: usize, noise: f64) -> (f64, Vec<usize>) {
            let mut acceptance = Acceptance::default();
            let (mut tokens, mut time) = (0.0, 0.0);
            let mut widths = vec![0; self.target.len()];
            let reachable = self.target.len() - 1;
            for _ in 0..steps {
                let width = policy.choose(1, &alone(&acceptance), reachable);
                widths[width] += 1;
                let slow = 1.0 + noise * self.random();
                policy.record_target(1, width, self.target[width] * slow);
                time += self.target[width];
                tokens += 1.0;
                if width > 1 {
                    policy.record_draft(1, self.draft * slow);
                    time += self.draft;
                    let accepted = self.accepted(width - 1);
                    acceptance.record(width - 1, accepted);
                    policy.record_acceptance(width - 1, accepted);
                    tokens += accepted as f64;
                }
            }
            (tokens / time, widths)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn it_keeps_most_of_the_best_widths_speed_and_stays_near_plain_steps_where_they_are_best(
            row in 0.0f64..0.3,
            draft in 0.02f64..0.8,
            first in 0.0f64..1.0,
            fading in 0.7f64..1.0,
            noise in 0.0f64..0.3,
            state: u64,
        ) {
            let widest = 8;
            let mut world = World {
                target: (0..=widest).map(|width| 0.01 * (1.0 + row * width as f64)).collect(),
                draft: 0.01 * draft,
                chances: (0..widest).map(|index| first * fading.powi(index as i32)).collect(),
                state,
            };
            let best = (1..=widest).map(|width| world.rate(width)).fold(0.0, f64::max);
            let plain = world.rate(1);
            let (rate, widths) = world.run(&mut WidthPolicy::new(true, 1, widest), 4000, noise);
            prop_assert!(rate > 0.8 * best, "{rate} of {best}, plain {plain}, widths {widths:?}");
            prop_assert!(rate > 0.9 * plain, "{rate} of plain {plain}, widths {widths:?}");
        }
    }

    fn good_world() -> World {
        World {
            target: vec![0.0, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35],
            draft: 0.15,
            chances: vec![0.9; 8],
            state: 1,
        }
    }

    #[test]
    fn it_turns_to_plain_steps_when_acceptance_falls_and_back_when_it_rises() {
        let mut world = good_world();
        let mut policy = WidthPolicy::new(true, 1, 8);
        let (_, widths) = world.run(&mut policy, 1000, 0.0);
        assert!(widths[8] > 900, "{widths:?}");
        world.chances = vec![0.02; 8];
        let (_, widths) = world.run(&mut policy, 1000, 0.0);
        assert!(widths[1] > 850, "{widths:?}");
        world.chances = vec![0.9; 8];
        let (_, widths) = world.run(&mut policy, 3000, 0.0);
        assert!(widths[8] > 1000, "{widths:?}");
    }

    #[test]
    fn where_drafting_never_pays_it_is_tried_less_and_less_often() {
        let mut world = good_world();
        world.chances = vec![0.2; 8];
        let mut policy = WidthPolicy::new(true, 1, 8);
        world.run(&mut policy, 1000, 0.1);
        let (rate, widths) = world.run(&mut policy, 8000, 0.1);
        assert!(widths[1] > 7850, "{widths:?}");
        assert!(rate > 0.997 * world.rate(1), "{rate}");
    }

    #[test]
    fn short_completions_are_learnt_from_as_well() {
        let mut policy = WidthPolicy::new(true, 1, 8);
        let acceptance = Acceptance::default();
        let prices = [0.0, 1.0, 2.0, 3.0, 4.0];
        let mut widths = [0; 9];
        for _ in 0..200 {
            // No completion has room for more than four tokens, and nothing is ever accepted.
            let width = policy.choose(1, &alone(&acceptance), 4).min(4);
            widths[width] += 1;
            policy.record_target(1, width, prices[width]);
            if width > 1 {
                policy.record_draft(1, 1.0);
                policy.record_acceptance(width - 1, 0);
            }
        }
        assert!(widths[1] > 170, "{widths:?}");
    }

    /// Runs steps over eight slots, of which `scouts` draft and the others rest, until `done` or for `steps`; whether it got there.
    fn run_eight(
        policy: &mut WidthPolicy,
        world: &mut World,
        scouts: usize,
        steps: usize,
        done: impl Fn(&WidthPolicy) -> bool,
    ) -> bool {
        let mut acceptances = vec![Acceptance::default(); scouts];
        for _ in 0..steps {
            let members = Members {
                drafting: acceptances.iter().collect(),
                resting: 8 - scouts,
                plain: 0,
            };
            let width = policy.choose(8, &members, 8);
            policy.record_target(8, width, world.target[width]);
            if width > 1 {
                policy.record_draft(8, world.draft);
                for acceptance in &mut acceptances {
                    let accepted = world.accepted(width - 1);
                    acceptance.record(width - 1, accepted);
                    policy.record_acceptance(width - 1, accepted);
                }
            }
            if done(policy) {
                return true;
            }
        }
        false
    }

    #[test]
    fn drafting_rests_where_it_does_not_pay_but_for_a_scout_that_notices_when_it_does() {
        let mut world = good_world();
        world.chances = vec![0.05; 8];
        let mut policy = WidthPolicy::new(true, 64, 8);
        assert!(!policy.lets_rest(7, 7), "nothing is known yet");
        let rests = |policy: &WidthPolicy| policy.lets_rest(7, 7);
        assert!(run_eight(&mut policy, &mut world, 8, 150, rests));
        assert!(!policy.lets_rest(0, 0), "one slot is not eight");
        let due = |policy: &WidthPolicy| !policy.lets_rest(7, 0);
        assert!(!due(&policy), "there was a step to learn just before");
        assert!(run_eight(&mut policy, &mut world, 0, 600, due));
        assert!(policy.lets_rest(7, 1), "one of eight is a scout");
        assert!(!policy.lets_rest(8, 1), "two of nine are");
        assert!(policy.lets_rest(8, 2));
        assert!(run_eight(&mut policy, &mut world, 1, 1, |policy| !due(
            policy
        )));
        // For a scout alone a wide step never pays; what counts is what it would be for all.
        world.chances = vec![0.9; 8];
        let awake = |policy: &WidthPolicy| !policy.lets_rest(7, 7);
        assert!(run_eight(&mut policy, &mut world, 1, 4000, awake));
    }

    #[test]
    fn a_number_of_slots_that_was_never_tried_does_not_rest_for_ever() {
        let mut world = good_world();
        world.chances = vec![0.05; 8];
        let mut policy = WidthPolicy::new(true, 64, 8);
        let rests = |policy: &WidthPolicy| policy.lets_rest(7, 7);
        assert!(run_eight(&mut policy, &mut world, 8, 150, rests));
        // From here on it is twelve of them, of which all rest.
        let is_scouted = (0..2 * LONGEST_EXPLORATION_STEPS).any(|_| {
            let members = Members {
                resting: 12,
                ..Members::default()
            };
            assert_eq!(policy.choose(12, &members, 8), 1);
            policy.record_target(12, 1, world.target[1]);
            !policy.lets_rest(11, 0)
        });
        assert!(is_scouted);
    }

    #[test]
    fn scouts_whose_prompts_are_fed_again_come_as_seldom_as_their_share_of_the_time_allows() {
        let mut world = good_world();
        world.chances = vec![0.05; 8];
        let mut policy = WidthPolicy::new(true, 64, 8);
        let rests = |policy: &WidthPolicy| policy.lets_rest(7, 7);
        assert!(run_eight(&mut policy, &mut world, 8, 150, rests));
        let due = |policy: &WidthPolicy| !policy.lets_rest(7, 0);
        assert!(run_eight(&mut policy, &mut world, 0, 600, due));
        policy.record_feed(10, 1.0);
        policy.record_fed_again(8, 100);
        assert!(!due(&policy.clone()), "ten seconds are owed");
        let steps = (10.0 / SCOUTING_SHARE / world.target[1]) as usize;
        let mut early = policy.clone();
        assert!(!run_eight(&mut early, &mut world, 0, steps - 10, due));
        assert!(run_eight(&mut policy, &mut world, 0, steps + 10, due));
        // Where drafting pays nobody is a scout, and nothing is owed.
        world.chances = vec![0.9; 8];
        let awake = |policy: &WidthPolicy| !policy.lets_rest(7, 7);
        assert!(run_eight(&mut policy, &mut world, 1, 4000, awake));
        policy.record_fed_again(8, 100);
        assert!(awake(&policy));
    }

    #[test]
    fn a_fixed_width_lets_none_rest() {
        let mut world = good_world();
        world.chances = vec![0.0; 8];
        let mut policy = WidthPolicy::new(false, 8, 8);
        let rests = |policy: &WidthPolicy| policy.lets_rest(7, 7);
        assert!(!run_eight(&mut policy, &mut world, 8, 500, rests));
    }

    #[test]
    fn what_eight_slots_taught_holds_for_about_as_many_at_first() {
        let acceptance = Acceptance::default();
        let tries = |policy: &mut WidthPolicy, slots| {
            let widths = (0..20).map(|_| {
                let width = policy.choose(slots, &alone(&acceptance), 8);
                policy.record_target(slots, width, 1.0);
                width
            });
            widths.filter(|&width| width > 1).count()
        };
        for (chance, most) in [(0.05, 0), (0.9, 20)] {
            let mut world = good_world();
            world.chances = vec![chance; 8];
            let mut policy = WidthPolicy::new(true, 64, 8);
            run_eight(&mut policy, &mut world, 8, 100, |_| false);
            for slots in [4, 7, 9, 16] {
                let tries = tries(&mut policy.clone(), slots);
                assert!(
                    tries <= most && (most == 0 || tries > 0),
                    "{slots}: {tries}"
                );
            }
            assert!(tries(&mut policy, 17) > 0, "nothing is known of so many");
        }
    }

    #[test]
    fn a_fixed_width_is_kept_to() {
        let mut world = good_world();
        world.chances = vec![0.0; 8];
        let (_, widths) = world.run(&mut WidthPolicy::new(false, 1, 8), 100, 0.0);
        assert_eq!(widths[8], 100);
    }

    #[test]
    fn the_noise_of_a_width_that_is_always_taken_does_not_move_its_price() {
        let mut world = good_world();
        let mut policy = WidthPolicy::new(true, 1, 8);
        world.run(&mut policy, 500, 0.0);
        for width in [1, 8] {
            let mut policy = policy.clone();
            let before = policy.prices[0].target(8) / policy.prices[0].target(1);
            for _ in 0..100_000 {
                let slow = 1.0 + 0.5 * world.random();
                policy.record_target(1, width, world.target[width] * slow);
            }
            let after = policy.prices[0].target(8) / policy.prices[0].target(1);
            let moved = after / before;
            assert!((0.9..1.1).contains(&moved), "{width}: {moved}");
        }
    }

    #[test]
    fn a_machine_that_slows_down_as_a_whole_changes_nothing() {
        let mut world = good_world();
        let mut policy = WidthPolicy::new(true, 1, 8);
        world.run(&mut policy, 500, 0.0);
        for time in &mut world.target {
            *time *= 5.0;
        }
        world.draft *= 5.0;
        let (_, widths) = world.run(&mut policy, 500, 0.0);
        assert!(widths[8] > 420, "{widths:?}");
    }
}
