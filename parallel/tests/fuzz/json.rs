//! Damage to JSON that stays JSON.

use serde_json::{Map, Number, Value, json};

use crate::random::Random;

/// Texts that mean something to a reader, of either kind of file.
const TEXTS: [&str; 24] = [
    "",
    "a",
    "F16",
    "BF16",
    "F32",
    "F64",
    "I8",
    "BOOL",
    "F4",
    "F8_E4M3",
    "C64",
    "../model.safetensors",
    "/etc/passwd",
    ".",
    "..",
    "config.json",
    "model-00001-of-00002.safetensors",
    "llama3",
    "yarn",
    "linear",
    "LlamaForCausalLM",
    "silu",
    "\u{0}",
    "\u{10ffff}\\\"",
];

/// Changes one or two places, and returns the text; nothing where it was no JSON.
pub(crate) fn damaged(random: &mut Random, text: &[u8]) -> Option<Vec<u8>> {
    let mut value: Value = serde_json::from_slice(text).ok()?;
    let mut repeated = None;
    for _ in 0..=random.below(2) {
        let count = count(&value);
        let donor = node(&mut value, random.below(count)).clone();
        let target = node(&mut value, random.below(count));
        match target {
            Value::Object(object) if !random.once_in(4) => {
                change_object(random, object, donor, &mut repeated)
            }
            Value::Array(array) if !random.once_in(4) => change_array(random, array, donor),
            target => *target = replacement(random, target, donor),
        }
    }
    let mut text = value.to_string();
    if let Some((mark, key)) = repeated {
        text = text.replacen(&format!("\"{mark}\""), &Value::String(key).to_string(), 1);
    }
    Some(text.into_bytes())
}

/// Values in the tree, itself among them.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Object(object) => object.values().map(count).sum(),
        Value::Array(array) => array.iter().map(count).sum(),
        _ => 0,
    }
}

/// The value of that number, in the order of [`count`].
fn node(value: &mut Value, index: usize) -> &mut Value {
    if index == 0 {
        return value;
    }
    let children: Vec<&mut Value> = match value {
        Value::Object(object) => object.values_mut().collect(),
        Value::Array(array) => array.iter_mut().collect(),
        _ => Vec::new(),
    };
    let mut left = index - 1;
    for child in children {
        let size = count(child);
        if left < size {
            return node(child, left);
        }
        left -= size;
    }
    unreachable!("the index was drawn below the count")
}

/// `repeated` is a key that stands for another one, which is already there: a tree cannot hold both.
fn change_object(
    random: &mut Random,
    object: &mut Map<String, Value>,
    donor: Value,
    repeated: &mut Option<(String, String)>,
) {
    let keys: Vec<String> = object.keys().cloned().collect();
    let Some(key) = (!keys.is_empty()).then(|| random.one_of(&keys).clone()) else {
        drop(object.insert("a".to_owned(), donor));
        return;
    };
    match random.below(4) {
        0 => drop(object.remove(&key)),
        1 => {
            let value = object.remove(&key).unwrap_or_default();
            drop(object.insert(format!("{key}x"), value));
        }
        2 => {
            let mark = "the same key again".to_owned();
            drop(object.insert(mark.clone(), donor));
            *repeated = Some((mark, key));
        }
        _ => drop(object.insert((*random.one_of(&TEXTS)).to_owned(), donor)),
    }
}

fn change_array(random: &mut Random, array: &mut Vec<Value>, donor: Value) {
    match random.below(3) {
        0 => drop(array.pop()),
        1 => array.push(donor),
        _ => array.reverse(),
    }
}

fn replacement(random: &mut Random, old: &Value, donor: Value) -> Value {
    if let Some(number) = old.as_u64().filter(|_| !random.once_in(3)) {
        return match random.below(3) {
            0 => json!(number.wrapping_add(random.up_to(8) as u64).wrapping_sub(4)),
            1 => json!(number.wrapping_mul(2)),
            _ => json!(u64::MAX >> random.below(64)),
        };
    }
    match random.below(8) {
        0 => donor,
        1 => Value::String((*random.one_of(&TEXTS)).to_owned()),
        2 => json!([null, true, 0, -1, 1, 0.5]).get(random.below(6)).cloned().unwrap_or_default(),
        3 => Number::from_f64([1e300, 1e-300, -0.0, 1e39, -1e39][random.below(5)])
            .map_or(Value::Null, Value::Number),
        4 => json!([u64::MAX, i64::MIN, i64::MAX, 1_u64 << 53])
            .get(random.below(4))
            .cloned()
            .unwrap_or_default(),
        5 => (0..random.below(200)).fold(donor, |inner, _| json!([inner])),
        6 => Value::Array(vec![json!(0); random.below(500)]),
        _ => Value::String("x".repeat(random.below(3000))),
    }
}
