//! The rotary part of `config.json`, in both forms in use: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before).

use anyhow::{Context, bail, ensure};

use super::fields::Fields;
use crate::checkpoint::{Rope, RopeScaling};

const DEFAULT_THETA: f64 = 10_000.0;

/// Takes the rotary settings out of `config.json`; without a base it is the one of the first Llama models.
pub fn read(fields: &mut Fields, context_tokens: usize) -> anyhow::Result<Rope> {
    let (theta, scaling) = read_parts(fields, context_tokens)?;
    Ok(Rope {
        theta: theta.unwrap_or(DEFAULT_THETA),
        scaling,
    })
}

/// Takes the rotary settings out of a `config.json` that must name its base.
pub fn read_stated(fields: &mut Fields, context_tokens: usize) -> anyhow::Result<Rope> {
    let place = fields.place().to_owned();
    let (theta, scaling) = read_parts(fields, context_tokens)?;
    Ok(Rope {
        theta: theta.with_context(|| format!("{place}: rope_theta is missing"))?,
        scaling,
    })
}

fn read_parts(
    fields: &mut Fields,
    context_tokens: usize,
) -> anyhow::Result<(Option<f64>, RopeScaling)> {
    let outer_theta = fields.number("rope_theta")?;
    require_full_rotation(fields)?;
    let parameters = match (
        fields.object("rope_parameters")?,
        fields.object("rope_scaling")?,
    ) {
        (Some(_), Some(_)) => bail!(
            "config.json has both rope_parameters and rope_scaling: remove the one that doesn't count"
        ),
        (parameters, scaling) => parameters.or(scaling),
    };
    let Some(mut parameters) = parameters else {
        return Ok((outer_theta, RopeScaling::None));
    };

    let inner_theta = parameters.number("rope_theta")?;
    if let (Some(outer), Some(inner)) = (outer_theta, inner_theta) {
        ensure!(
            outer == inner,
            "config.json: rope_theta is {outer}, but {inner} in {}",
            parameters.place()
        );
    }
    require_full_rotation(&mut parameters)?;
    let scaling = scaling(&mut parameters, context_tokens)?;
    parameters.finish()?;
    Ok((inner_theta.or(outer_theta), scaling))
}

fn require_full_rotation(fields: &mut Fields) -> anyhow::Result<()> {
    let factor = fields.number("partial_rotary_factor")?.unwrap_or(1.0);
    ensure!(
        factor == 1.0,
        "{}: partial_rotary_factor {factor} is not supported, only 1",
        fields.place()
    );
    Ok(())
}

fn scaling(parameters: &mut Fields, context_tokens: usize) -> anyhow::Result<RopeScaling> {
    let old_kind = parameters.text("type")?;
    let kind = parameters
        .text("rope_type")?
        .or(old_kind)
        .unwrap_or_else(|| "default".to_string());
    match kind.as_str() {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear {
            factor: factor(parameters)?,
        }),
        "llama3" => {
            let scaling = RopeScaling::Llama3 {
                factor: factor(parameters)?,
                low_freq_factor: parameters.required_number("low_freq_factor")?,
                high_freq_factor: parameters.required_number("high_freq_factor")?,
                original_context: original_context(parameters, context_tokens)?,
            };
            if let RopeScaling::Llama3 {
                low_freq_factor,
                high_freq_factor,
                ..
            } = scaling
            {
                ensure!(
                    0.0 < low_freq_factor && low_freq_factor < high_freq_factor,
                    "{}: low_freq_factor {low_freq_factor} is not between 0 and high_freq_factor {high_freq_factor}",
                    parameters.place()
                );
            }
            Ok(scaling)
        }
        "yarn" => yarn(parameters, context_tokens),
        other => bail!(
            "{}: rope type {other} is not supported, only default, linear, llama3 and yarn",
            parameters.place()
        ),
    }
}

fn factor(parameters: &mut Fields) -> anyhow::Result<f64> {
    let factor = parameters.required_number("factor")?;
    check_factor(factor, parameters)
}

fn check_factor(factor: f64, parameters: &Fields) -> anyhow::Result<f64> {
    ensure!(
        factor >= 1.0,
        "{}: factor is {factor}, allowed is 1 and more",
        parameters.place()
    );
    Ok(factor)
}

fn original_context(parameters: &mut Fields, context_tokens: usize) -> anyhow::Result<usize> {
    let original = parameters
        .size("original_max_position_embeddings")?
        .unwrap_or(context_tokens);
    ensure!(
        original > 0,
        "{}: original_max_position_embeddings is 0",
        parameters.place()
    );
    Ok(original)
}

fn yarn(parameters: &mut Fields, context_tokens: usize) -> anyhow::Result<RopeScaling> {
    let original_context = original_context(parameters, context_tokens)?;
    // Null asks for the ratio of the contexts; no key at all is an error, as for the other kinds.
    let asks_for_ratio = parameters.is_null("factor");
    let factor = if asks_for_ratio {
        check_factor(context_tokens as f64 / original_context as f64, parameters)?
    } else {
        factor(parameters)?
    };
    // A note about training, written by the first configurations with YaRN.
    parameters.flag("finetuned")?;

    // 0 stands for "not set" in all of these.
    let mut number = |key: &str| -> anyhow::Result<Option<f64>> {
        Ok(parameters.number(key)?.filter(|&number| number != 0.0))
    };
    let beta_fast = number("beta_fast")?.unwrap_or(32.0);
    let beta_slow = number("beta_slow")?.unwrap_or(1.0);
    let (mscale, mscale_all_dim) = (number("mscale")?, number("mscale_all_dim")?);
    let inferred = match (mscale, mscale_all_dim) {
        (Some(mscale), Some(mscale_all_dim)) => {
            magnitude(factor, mscale) / magnitude(factor, mscale_all_dim)
        }
        _ => magnitude(factor, 1.0),
    };
    let attention_factor = parameters.number("attention_factor")?.unwrap_or(inferred);
    let truncate = parameters.flag("truncate")?.unwrap_or(true);
    let place = parameters.place();
    ensure!(
        beta_fast > beta_slow && beta_slow > 0.0,
        "{place}: beta_slow {beta_slow} is not between 0 and beta_fast {beta_fast}"
    );
    ensure!(
        attention_factor > 0.0 && attention_factor.is_finite(),
        "{place}: attention_factor {attention_factor} is not positive"
    );
    Ok(RopeScaling::Yarn {
        factor,
        original_context,
        beta_fast,
        beta_slow,
        attention_factor,
        truncate,
    })
}

/// YaRN's recommended growth of cos and sin with the factor.
fn magnitude(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * weight * libm::log(factor) + 1.0
    }
}
