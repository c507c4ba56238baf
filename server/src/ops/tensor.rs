//! Tensors of a running kernel, read straight from ONNX Runtime.
//!
//! `ort`'s own accessors describe every tensor anew on the heap, a dozen times per node and step; these ask for what a kernel needs and no more.
//! They also hand out memory without making a reference to it, so that an input and an output may be the same memory.

use std::{marker::PhantomData, ops::Range, ptr};

use ort::{AsPointer, operator::ComputeContext, ortsys, sys, value::PrimitiveTensorElementType};

/// A tensor of element type `T` in CPU memory, valid as long as the kernel runs.
#[derive(Clone, Copy, Debug)]
pub struct RawTensor<'a, T> {
    data: *mut T,
    shape: &'a [i64],
    elements: usize,
    element: PhantomData<T>,
}

impl<'a, T: PrimitiveTensorElementType> RawTensor<'a, T> {
    /// Input `index`; `None` when the node does not have it.
    pub fn input(context: &'a ComputeContext, index: usize) -> ort::Result<Option<Self>> {
        // Beyond the last input ONNX Runtime reports an error instead of an absent one.
        if index >= context.num_inputs()? {
            return Ok(None);
        }
        let mut value: *const sys::OrtValue = ptr::null();
        ortsys![unsafe KernelContext_GetInput(context.ptr(), index, &mut value)?];
        // SAFETY: ONNX Runtime keeps the value for as long as the kernel runs, which the context's lifetime stands for.
        unsafe { Self::of(value.cast_mut()) }
    }

    /// Input `index`, or an error that names it.
    pub fn required_input(
        context: &'a ComputeContext,
        index: usize,
        name: &str,
    ) -> ort::Result<Self> {
        Self::input(context, index)?
            .ok_or_else(|| ort::Error::new(format!("input {name} is missing")))
    }

    /// Output `index` with this shape, allocated or as the caller bound it; `None` when nothing wants it.
    pub fn output(
        context: &'a ComputeContext,
        index: usize,
        shape: &[i64],
    ) -> ort::Result<Option<Self>> {
        if index >= context.num_outputs()? {
            return Ok(None);
        }
        let mut value: *mut sys::OrtValue = ptr::null_mut();
        ortsys![unsafe KernelContext_GetOutput(context.ptr().cast_mut(), index, shape.as_ptr(), shape.len(), &mut value)?];
        // SAFETY: as for inputs.
        unsafe { Self::of(value) }
    }

    /// # Safety
    /// `value` is null or a value that lives as long as `'a`.
    unsafe fn of(value: *mut sys::OrtValue) -> ort::Result<Option<Self>> {
        if value.is_null() {
            return Ok(None);
        }
        let mut element_type =
            sys::ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
        let (mut dims, mut rank, mut data) = (ptr::null(), 0, ptr::null_mut());
        ortsys![unsafe GetTensorElementTypeAndShapeDataReference(value, &mut element_type, &mut dims, &mut rank)?];
        let expected: sys::ONNXTensorElementDataType = T::into_tensor_element_type().into();
        if element_type != expected {
            return Err(ort::Error::new(format!(
                "a tensor has element type {element_type:?}; expected is {expected:?}"
            )));
        }
        ortsys![unsafe GetTensorMutableData(value, &mut data)?];
        let shape: &[i64] = if rank == 0 {
            &[]
        } else {
            // SAFETY: ONNX Runtime promises `rank` dimensions, valid as long as the value; for a scalar there may be no pointer.
            unsafe { std::slice::from_raw_parts(dims, rank) }
        };
        let elements = shape
            .iter()
            .try_fold(1_usize, |product, &dim| {
                product.checked_mul(usize::try_from(dim).ok()?)
            })
            .ok_or_else(|| ort::Error::new(format!("a tensor has impossible shape {shape:?}")))?;
        Ok(Some(Self {
            data: data.cast(),
            shape,
            elements,
            element: PhantomData,
        }))
    }

    /// Its dimensions.
    pub fn shape(&self) -> &'a [i64] {
        self.shape
    }

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The addresses of its elements.
    pub fn addresses(&self) -> Range<usize> {
        let start = self.data as usize;
        start..start + self.elements * size_of::<T>()
    }

    /// The addresses of the elements of a tensor that may be absent.
    pub fn addresses_of(tensor: &Option<Self>) -> Range<usize> {
        tensor.as_ref().map_or(0..0, Self::addresses)
    }

    /// Its elements.
    ///
    /// # Safety
    /// Nothing writes to this memory while the slice is used.
    pub unsafe fn slice(&self) -> &'a [T] {
        if self.elements == 0 {
            return &[];
        }
        // SAFETY: ONNX Runtime promises as many elements as the shape says, aligned for any element type; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.data, self.elements) }
    }

    /// Its elements, for writing.
    ///
    /// # Safety
    /// It is an output, every element it starts with is a value of `T`, and nothing else uses this memory while the slice is used.
    pub unsafe fn slice_mut(&mut self) -> &'a mut [T] {
        if self.elements == 0 {
            return &mut [];
        }
        // SAFETY: as in `slice`.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.elements) }
    }
}
