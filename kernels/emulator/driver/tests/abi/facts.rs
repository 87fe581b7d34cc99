//! What can be said of a C interface in lines of text, so that two views of it can be compared.
#![allow(unsafe_code)] // in the types of functions, none of which is called

use std::{any::type_name, collections::BTreeSet};

/// One line for each value, size, offset and signature.
#[derive(Default)]
pub(crate) struct Facts(BTreeSet<String>);

impl Facts {
    /// Those of a text.
    pub(crate) fn of(text: &str) -> Facts {
        Facts(text.lines().map(str::to_owned).collect())
    }

    pub(crate) fn constant(&mut self, name: &str, value: i64) {
        self.0.insert(format!("{name} = {value}"));
    }

    pub(crate) fn size(&mut self, name: &str, bytes: usize) {
        self.0.insert(format!("sizeof {name} = {bytes}"));
    }

    /// A field that Rust's words would hide has a `_` behind it in the bindings.
    pub(crate) fn offset(&mut self, of: &str, field: &str, bytes: usize) {
        self.0.insert(format!("offsetof {of}.{} = {bytes}", field.trim_end_matches('_')));
    }

    pub(crate) fn function(&mut self, name: &str, signature: String) {
        self.0.insert(format!("{name} = {signature}"));
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether something of this name is among them.
    pub(crate) fn name(&self, name: &str) -> bool {
        self.0.iter().any(|line| line.split(" = ").next() == Some(name))
    }

    /// All but those of these names.
    pub(crate) fn without(&self, names: &[&str]) -> Facts {
        let others = self.0.iter().filter(|line| !names.contains(&line.split(" = ").next().unwrap_or("")));
        Facts(others.cloned().collect())
    }

    /// What only one of both says.
    pub(crate) fn differences(&self, other: &Facts) -> Vec<String> {
        let ours = self.0.difference(&other.0).map(|line| format!("the library: {line}"));
        let theirs = other.0.difference(&self.0).map(|line| format!("the bindings: {line}"));
        ours.chain(theirs).collect()
    }
}

/// A value as calls pass it: its size, marked if it travels in a floating-point register.
fn passed<T>() -> String {
    let float = matches!(type_name::<T>(), "f32" | "f64");
    format!("{}{}", if float { "f" } else { "" }, size_of::<T>())
}

macro_rules! signatures {
    ($($name:ident($($parameter:ident),*);)*) => {
        $(
            /// The signature of a function with so many parameters.
            pub(crate) fn $name<Out, $($parameter),*>(_: unsafe fn($($parameter),*) -> Out) -> String {
                let parameters: Vec<String> = vec![$(passed::<$parameter>()),*];
                format!("{}({})", passed::<Out>(), parameters.join(","))
            }
        )*
    };
}

signatures! {
    parameters_0();
    parameters_1(A);
    parameters_2(A, B);
    parameters_3(A, B, C);
    parameters_4(A, B, C, D);
    parameters_5(A, B, C, D, E);
    parameters_6(A, B, C, D, E, F);
    parameters_7(A, B, C, D, E, F, G);
    parameters_8(A, B, C, D, E, F, G, H);
    parameters_9(A, B, C, D, E, F, G, H, I);
    parameters_10(A, B, C, D, E, F, G, H, I, J);
    parameters_11(A, B, C, D, E, F, G, H, I, J, K);
    parameters_16(A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P);
}

macro_rules! constants {
    ($facts:ident, $module:ident::$type:ident { $($name:ident),* $(,)? }) => {
        $($facts.constant(stringify!($name), $module::$type::$name as i64);)*
    };
}

macro_rules! sizes {
    ($facts:ident, $module:ident { $($name:ident),* $(,)? }) => {
        $($facts.size(stringify!($name), size_of::<$module::$name>());)*
    };
}

macro_rules! offsets {
    ($facts:ident, $module:ident::$type:ident { $($field:ident),* $(,)? }) => {
        $($facts.offset(stringify!($type), stringify!($field), std::mem::offset_of!($module::$type, $field));)*
    };
}

macro_rules! functions {
    ($facts:ident, $module:ident, $signature:ident { $($name:ident),* $(,)? }) => {
        $($facts.function(stringify!($name), facts::$signature($module::$name));)*
    };
}

pub(crate) use {constants, functions, offsets, sizes};
