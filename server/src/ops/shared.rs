//! A slice that tasks write to in parallel, each its own part.

use std::{marker::PhantomData, ops::Range};

/// A mutable slice shared by tasks that never touch the same elements.
pub struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: `slice` is the only access and asks its callers for disjoint parts, each of which may be used on another thread when `T` may.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Shares `slice` for as long as it is borrowed.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// No two parts that exist at the same time overlap.
    #[expect(
        clippy::mut_from_ref,
        reason = "that is the purpose; the caller vouches for disjoint parts"
    )]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} is not within {}",
            self.len
        );
        // SAFETY: within the slice by the assertion, and unshared by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
