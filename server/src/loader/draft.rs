//! The draft side of loading: whether the bundle's draft can be used, and what callers and operators are told when it can't.
//!
//! A draft can only cost speed, so everything that is wrong with it leaves a server that serves without, unless it is required.
//! Only settings that no draft of this bundle could follow are errors by themselves.

use outrider_bundle::manifest::DraftFacts;
use outrider_bundle::verify::BundleError;
use outrider_bundle::{Manifest, VerifiedBundle};

use super::chain;
use crate::config::{AcceptanceStrategy, Speculative};
use crate::engine::LosslessClass;
use crate::http::backend::DraftCard;

/// Why a server has no draft, for operators.
#[derive(Debug, thiserror::Error)]
pub enum Absence {
    /// The bundle holds none.
    #[error("the bundle has no draft")]
    NotInBundle,
    /// Its files are not those of the manifest, or not what the manifest says.
    #[error("the draft is damaged: {0}")]
    Damaged(String),
    /// Drafting could change what the target computes.
    #[error(
        "the target's lossless class is {}, and serving.speculative.acceptance_strategy strict needs exact",
        .0.as_str()
    )]
    NotExact(LosslessClass),
    /// It could not be loaded or run.
    #[error("the draft could not be loaded: {0}")]
    Refused(String),
}

impl Absence {
    /// The same for callers: nothing of the inside.
    pub fn for_callers(&self) -> String {
        match self {
            Self::NotInBundle => "the bundle has no draft".to_owned(),
            Self::Damaged(_) => "the draft is damaged".to_owned(),
            Self::NotExact(class) => {
                format!("the target's lossless class is {}", class.as_str())
            }
            Self::Refused(_) => "the draft could not be loaded".to_owned(),
        }
    }
}

/// Checks the settings that narrow a draft against the draft of the bundle, whatever state it is in.
///
/// # Errors
///
/// Settings are larger than the draft allows; all of them.
pub fn check_settings(
    draft_block_size: Option<usize>,
    candidate_topk: Option<usize>,
    draft: &DraftFacts,
) -> Result<(), Vec<String>> {
    let faults: Vec<String> = [
        ("draft_block_size", draft_block_size, draft.block_size),
        ("candidate_topk", candidate_topk, draft.top_k),
    ]
    .into_iter()
    .filter_map(|(key, value, own)| {
        let value = value.filter(|value| *value > own)?;
        Some(format!(
            "serving.speculative.{key} is {value}, and the draft of the bundle allows at most {own}"
        ))
    })
    .collect();
    if faults.is_empty() {
        Ok(())
    } else {
        Err(faults)
    }
}

/// The draft of a bundle by what is known before anything is loaded.
pub fn facts(bundle: &VerifiedBundle) -> Result<&DraftFacts, Absence> {
    presence(bundle.manifest(), bundle.draft_fault())
}

/// The draft that a manifest names, unless `fault` is wrong with it.
pub fn presence<'a>(
    manifest: &'a Manifest,
    fault: Option<&BundleError>,
) -> Result<&'a DraftFacts, Absence> {
    match (&manifest.draft, fault) {
        (None, _) => Err(Absence::NotInBundle),
        (Some(_), Some(fault)) => Err(Absence::Damaged(chain(fault))),
        (Some(draft), None) => Ok(draft),
    }
}

/// What interfaces show of a draft.
pub fn card(settings: &Speculative, draft: &DraftFacts) -> DraftCard {
    DraftCard {
        architecture: draft.architecture.clone(),
        block_size: settings.draft_block_size.unwrap_or(draft.block_size),
        candidate_topk: settings.candidate_topk.unwrap_or(draft.top_k),
        adaptive_width: settings.adaptive_width,
    }
}

/// Tokens of the widest block that the draft may propose; the target needs room for it.
pub fn block_size(settings: &Speculative, draft: Option<&DraftFacts>) -> Option<usize> {
    draft.map(|draft| settings.draft_block_size.unwrap_or(draft.block_size))
}

/// Whether what drafting may change is nothing.
pub fn check_class(settings: &Speculative, class: LosslessClass) -> Result<(), Absence> {
    match settings.acceptance_strategy {
        AcceptanceStrategy::Strict if class != LosslessClass::Exact => {
            Err(Absence::NotExact(class))
        }
        AcceptanceStrategy::Strict => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use outrider_bundle::manifest::{Attention, Precision};

    use super::*;

    fn settings(block_size: Option<usize>, topk: Option<usize>) -> Speculative {
        Speculative {
            enabled: true,
            required: false,
            draft_block_size: block_size,
            adaptive_width: false,
            candidate_topk: topk,
            acceptance_strategy: AcceptanceStrategy::Strict,
        }
    }

    fn facts_of_a_draft() -> DraftFacts {
        DraftFacts {
            graph: "draft.onnx".to_owned(),
            architecture: "DFlash2DraftModel".to_owned(),
            precision: Precision::Fp32,
            form: Attention::Native,
            layers: 1,
            kv_heads: 1,
            head_dim: 4,
            kv_dtype: "float32".to_owned(),
            vocabulary_columns: 32,
            block_size: 16,
            top_k: 4,
            mask_token_id: 1,
            target_layer_ids: vec![0],
            context_tokens: 64,
        }
    }

    #[test]
    fn a_setting_above_the_drafts_own_names_both_values() {
        let draft = facts_of_a_draft();
        let check = |block_size, topk, expected: Result<(), &str>| {
            let found = check_settings(block_size, topk, &draft);
            assert_eq!(found, expected.map_err(|fault| vec![fault.to_owned()]));
        };
        check(None, None, Ok(()));
        check(Some(16), Some(4), Ok(()));
        check(Some(2), Some(1), Ok(()));
        check(
            Some(17),
            None,
            Err(
                "serving.speculative.draft_block_size is 17, and the draft of the bundle allows at most 16",
            ),
        );
        check(
            None,
            Some(5),
            Err(
                "serving.speculative.candidate_topk is 5, and the draft of the bundle allows at most 4",
            ),
        );
        let both = check_settings(Some(17), Some(5), &draft).unwrap_err();
        assert_eq!(both.len(), 2, "{both:?}");
    }

    #[test]
    fn a_card_shows_what_is_in_use() {
        let draft = facts_of_a_draft();
        let own = card(&settings(None, None), &draft);
        assert_eq!((own.block_size, own.candidate_topk), (16, 4));
        let narrowed = card(&settings(Some(3), Some(2)), &draft);
        assert_eq!((narrowed.block_size, narrowed.candidate_topk), (3, 2));
    }

    #[test]
    fn only_an_exact_target_is_drafted_for() {
        let check = |class| {
            check_class(&settings(None, None), class)
                .err()
                .map(|absence| (absence.to_string(), absence.for_callers()))
        };
        assert_eq!(check(LosslessClass::Exact), None);
        let (reason, public) = check(LosslessClass::NearTie).unwrap();
        assert_eq!(
            reason,
            "the target's lossless class is near-tie, and serving.speculative.acceptance_strategy strict needs exact"
        );
        assert_eq!(public, "the target's lossless class is near-tie");
        assert!(check(LosslessClass::None).is_some());
    }

    #[test]
    fn the_target_has_room_for_the_widest_block_in_use() {
        let draft = facts_of_a_draft();
        assert_eq!(block_size(&settings(None, None), Some(&draft)), Some(16));
        assert_eq!(block_size(&settings(Some(8), None), Some(&draft)), Some(8));
        assert_eq!(block_size(&settings(Some(8), None), None), None);
    }
}
