//! Drafters that are of no use, made of the weights of a good one.

use crate::checkpoint::Weights;
use crate::random::Random;

use super::cases::Drafter;

/// The norm before the head.
const LAST_NORM: &str = "norm.weight";

/// The weights of a draft checkpoint, changed.
pub struct BadDrafter {
    /// The good ones.
    pub weights: Box<dyn Weights>,
    /// In which way they are changed.
    pub drafter: Drafter,
}

impl Weights for BadDrafter {
    fn names(&self) -> Vec<String> {
        self.weights.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.weights.shape(name)
    }

    fn load(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        let mut values = self.weights.load(name)?;
        match self.drafter {
            Drafter::Trained => {}
            Drafter::Random => {
                let mut random = Random::new(seed(name));
                let shape = self.shape(name).unwrap_or_default();
                // Norms stay near 1 and matrices keep the size of what goes through them.
                let (middle, spread) = match shape[..] {
                    [.., _, columns] => (0.0, 1.7 / (columns as f32).sqrt()),
                    _ => (1.0, 0.2),
                };
                values
                    .iter_mut()
                    .for_each(|value| *value = middle + spread * random.symmetric());
            }
            // All logits and all scores of pairs change their sign, so the least likely path is proposed.
            Drafter::Wrong if name == LAST_NORM => {
                values.iter_mut().for_each(|value| *value = -*value);
            }
            Drafter::Wrong => {}
        }
        Ok(values)
    }
}

/// FNV-1a of the name.
fn seed(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ones;

    impl Weights for Ones {
        fn names(&self) -> Vec<String> {
            vec![LAST_NORM.to_owned(), "fc.weight".to_owned()]
        }

        fn shape(&self, name: &str) -> Option<Vec<usize>> {
            Some(if name == LAST_NORM {
                vec![4]
            } else {
                vec![2, 4]
            })
        }

        fn load(&self, name: &str) -> anyhow::Result<Vec<f32>> {
            Ok(vec![1.0; self.shape(name).unwrap().iter().product()])
        }
    }

    #[test]
    fn a_wrong_drafter_differs_in_the_sign_of_its_last_norm_and_a_random_one_in_all() {
        let load = |drafter, name: &str| {
            let weights = Box::new(Ones);
            BadDrafter { weights, drafter }.load(name).unwrap()
        };
        assert_eq!(load(Drafter::Wrong, LAST_NORM), [-1.0; 4]);
        assert_eq!(load(Drafter::Wrong, "fc.weight"), [1.0; 8]);
        assert_eq!(load(Drafter::Trained, LAST_NORM), [1.0; 4]);
        let random = load(Drafter::Random, "fc.weight");
        assert_eq!(random, load(Drafter::Random, "fc.weight"));
        assert!(random.iter().all(|value| value.abs() < 0.85), "{random:?}");
        assert!(random.windows(2).all(|pair| pair[0] != pair[1]));
        assert_ne!(random[..4], load(Drafter::Random, LAST_NORM));
    }
}
