//! Covering arrays: few rows in which every pair of values of any two factors meets.
//!
//! Rows are made one after the other: each takes an uncovered pair and then, factor by factor, the value that covers most of what is left
//! (Cohen, Dalal, Fredman and Patton, "The AETG system", 1997). The array is the smallest of several seeded attempts, so it is the same everywhere.

use crate::random::Random;

/// Attempts that the smallest array is chosen from.
const ATTEMPTS: u64 = 64;

/// Rows that cover all pairs; `sizes` holds the number of values of each factor, and a row one value index for each.
pub fn rows(sizes: &[usize]) -> Vec<Vec<usize>> {
    (0..ATTEMPTS)
        .map(|seed| attempt(sizes, &mut Random::new(seed)))
        .min_by_key(Vec::len)
        .expect("there is at least one attempt")
}

/// The pairs of values that no row has, as (factor, value, other factor, its value).
pub fn uncovered(sizes: &[usize], rows: &[Vec<usize>]) -> Vec<(usize, usize, usize, usize)> {
    let mut missing = Vec::new();
    for (first, &first_size) in sizes.iter().enumerate() {
        for (second, &second_size) in sizes.iter().enumerate().skip(first + 1) {
            for a in 0..first_size {
                for b in 0..second_size {
                    if !rows.iter().any(|row| row[first] == a && row[second] == b) {
                        missing.push((first, a, second, b));
                    }
                }
            }
        }
    }
    missing
}

fn attempt(sizes: &[usize], random: &mut Random) -> Vec<Vec<usize>> {
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut left = uncovered(sizes, &rows);
    while !left.is_empty() {
        let (first, a, second, b) = left[random.below(left.len())];
        let mut row = vec![None; sizes.len()];
        row[first] = Some(a);
        row[second] = Some(b);
        let mut open: Vec<usize> = (0..sizes.len())
            .filter(|&factor| row[factor].is_none())
            .collect();
        while !open.is_empty() {
            let factor = open.swap_remove(random.below(open.len()));
            let gain = |value: usize| {
                let met = |&&(first, a, second, b): &&(usize, usize, usize, usize)| {
                    (first == factor && a == value && row[second] == Some(b))
                        || (second == factor && b == value && row[first] == Some(a))
                };
                left.iter().filter(met).count()
            };
            // Among equals a random one, so that no value is favoured in the rows that are filled up at the end.
            let offset = random.below(sizes[factor]);
            let best = (0..sizes[factor])
                .map(|value| (value + offset) % sizes[factor])
                .max_by_key(|&value| gain(value));
            row[factor] = best;
        }
        let row: Vec<usize> = row
            .into_iter()
            .map(|value| value.expect("every factor was filled"))
            .collect();
        left.retain(|&(first, a, second, b)| row[first] != a || row[second] != b);
        rows.push(row);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_values_meets_in_a_row() {
        for sizes in [
            vec![2, 2],
            vec![5, 3, 5, 3, 2, 3, 2, 2, 2],
            vec![1, 7, 2, 1, 3],
            vec![3; 9],
        ] {
            let rows = rows(&sizes);
            assert_eq!(uncovered(&sizes, &rows), [], "{sizes:?}");
            for row in &rows {
                assert!(row.iter().zip(&sizes).all(|(value, size)| value < size));
            }
        }
    }

    #[test]
    fn the_array_is_little_larger_than_the_two_largest_factors_need() {
        let rows = rows(&[5, 3, 5, 3, 2, 3, 2, 2, 2]);
        assert!(rows.len() <= 30, "{} rows", rows.len());
    }

    #[test]
    fn a_pair_that_no_row_has_is_found() {
        let missing = uncovered(&[2, 2], &[vec![0, 0], vec![1, 1], vec![0, 1]]);
        assert_eq!(missing, [(0, 1, 1, 0)]);
    }
}
