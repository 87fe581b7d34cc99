//! Safetensors folders: one file, and several under an index.

use std::{collections::BTreeMap, fs, path::Path};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::json;

use crate::{
    campaign, fixture, json,
    mutate::{self, Field},
    random::Random,
    reading::{InputBytes, Outcome, exercise},
    write,
};

/// Files of a folder by name.
type Files = BTreeMap<String, Vec<u8>>;

const HEADER_LENGTH: Field = Field { at: 0, width: 8 };
const INDEX: &str = "model.safetensors.index.json";

fn single() -> Files {
    let names = ["config.json", "generation_config.json", "model.safetensors"];
    names.map(|name| (name.to_owned(), fs::read(fixture("twin").join(name)).unwrap())).into()
}

/// The same model in two files and all three types.
fn sharded() -> Files {
    let mut files = single();
    let whole = files.remove("model.safetensors").unwrap();
    let mut shards = [BTreeMap::new(), BTreeMap::new()];
    let mut map = serde_json::Map::new();
    for (index, (name, tensor)) in SafeTensors::deserialize(&whole).unwrap().tensors().into_iter().enumerate()
    {
        let halves = |keep: fn(&[u8]) -> [u8; 2]| tensor.data().chunks_exact(4).flat_map(keep).collect();
        let (dtype, data): (Dtype, Vec<u8>) = match index % 3 {
            0 => (Dtype::F32, tensor.data().to_vec()),
            1 => (Dtype::BF16, halves(|value| [value[2], value[3]])),
            // Half precision of other numbers: which ones does not matter here.
            _ => (Dtype::F16, halves(|value| [value[1], value[2]])),
        };
        map.insert(name.clone(), json!(format!("model-0000{}-of-00002.safetensors", index % 2 + 1)));
        shards[index % 2].insert(name, (dtype, tensor.shape().to_vec(), data));
    }
    for (index, shard) in shards.iter().enumerate() {
        let views = shard.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        files.insert(format!("model-0000{}-of-00002.safetensors", index + 1), bytes);
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    files.insert(INDEX.to_owned(), index.to_string().into_bytes());
    files
}

fn header_len(bytes: &[u8]) -> usize {
    mutate::get(bytes, HEADER_LENGTH).map_or(0, |length| length as usize)
}

/// The file with another header, with the length to match unless it is to be wrong.
fn with_header(bytes: &[u8], header: &[u8], is_length_kept: bool) -> Vec<u8> {
    let end = header_len(bytes).saturating_add(8).min(bytes.len());
    let length = if is_length_kept { header_len(bytes) } else { header.len() };
    [&(length as u64).to_le_bytes()[..], header, &bytes[end..]].concat()
}

fn damage_weights(random: &mut Random, bytes: &mut Vec<u8>, donor: &[u8]) {
    let header = 8..header_len(bytes).saturating_add(8).min(bytes.len()).max(8);
    match random.below(10) {
        0..5 => {
            let changed = bytes.get(header.clone()).and_then(|text| json::damaged(random, text));
            match changed {
                Some(text) => *bytes = with_header(bytes, &text, random.once_in(8)),
                None => mutate::blind(random, bytes, header),
            }
        }
        5 => mutate::field(random, bytes, &[HEADER_LENGTH]),
        6 => mutate::blind(random, bytes, header),
        7 => {
            let end = bytes.len();
            mutate::blind(random, bytes, header.end..end);
        }
        8 => mutate::splice(random, bytes, &[0, 8, header.end], donor),
        _ => mutate::splice(random, bytes, &[], donor),
    }
}

fn damage(random: &mut Random, files: &mut Files) {
    let names: Vec<String> = files.keys().cloned().collect();
    if names.is_empty() {
        return;
    }
    let name = random.one_of(&names);
    let donor = files[random.one_of(&names)].clone();
    if random.once_in(40) {
        // A file that is missing, or another one's contents.
        match random.below(2) {
            0 => drop(files.remove(name)),
            _ => drop(files.insert(name.clone(), donor)),
        }
        return;
    }
    let Some(bytes) = files.get_mut(name) else { return };
    if name.ends_with(".safetensors") {
        damage_weights(random, bytes, &donor);
        return;
    }
    match random.below(6) {
        0 => {
            let end = bytes.len();
            mutate::blind(random, bytes, 0..end);
        }
        1 => mutate::splice(random, bytes, &[], &donor),
        _ => *bytes = json::damaged(random, bytes).unwrap_or_default(),
    }
}

/// Writes the files in place of those that are there, and reads the folder.
fn read(files: &Files, folder: &Path, random: &mut Random) -> Outcome {
    let folder = folder.join("model");
    fs::create_dir_all(&folder).unwrap();
    for entry in fs::read_dir(&folder).unwrap() {
        let entry = entry.unwrap();
        if !files.contains_key(entry.file_name().to_str().unwrap()) {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    let mut input = InputBytes::default();
    for (name, bytes) in files {
        write(&folder.join(name), bytes);
        let is_config = matches!(name.as_str(), "config.json" | "generation_config.json");
        *if is_config { &mut input.config } else { &mut input.weights } += bytes.len();
    }
    exercise(&folder, input, random)
}

#[test]
fn damaged_safetensors_folders_do_no_harm() {
    let samples = [single(), sharded()];
    campaign::run("safetensors", |random, folder| {
        let mut files = random.one_of(&samples).clone();
        for _ in 0..=random.below(3) {
            damage(random, &mut files);
        }
        read(&files, folder, random)
    });
}

#[test]
fn both_samples_are_read_whole_before_they_are_damaged() {
    let folder = campaign::folder("safetensors-whole");
    for files in [single(), sharded()] {
        let outcome = read(&files, &folder, &mut Random::new(1));
        assert_eq!(outcome.opened, 1);
        assert!(outcome.to_string().contains("20 tensors read"), "{outcome}");
    }
}

#[test]
fn any_number_of_a_safetensors_header_may_be_any_extreme() {
    let folder = campaign::folder("safetensors-extremes");
    let (mut random, mut count, mut total) = (Random::new(1), 0, Outcome::default());
    let sample = single();
    let weights = &sample["model.safetensors"];
    let end = 8 + header_len(weights);
    let header = std::str::from_utf8(&weights[8..end]).unwrap();
    // Every run of digits behind a bracket or a comma is a dimension or an offset.
    let is_start = |at: usize| {
        header.as_bytes()[at].is_ascii_digit() && matches!(header.as_bytes()[at - 1], b'[' | b',' | b' ')
    };
    let starts: Vec<usize> = (1..header.len()).filter(|at| is_start(*at)).collect();
    for value in mutate::extremes(weights.len()) {
        let mut files = sample.clone();
        mutate::set(files.get_mut("model.safetensors").unwrap(), HEADER_LENGTH, value);
        let outcome = read(&files, &folder, &mut random);
        assert_eq!(outcome.opened, u64::from(value == header.len() as u64), "a header of {value} bytes");
        for start in &starts {
            let digits = header[*start..].bytes().take_while(u8::is_ascii_digit).count();
            let text = format!("{}{value}{}", &header[..*start], &header[start + digits..]);
            files.insert("model.safetensors".to_owned(), with_header(weights, text.as_bytes(), false));
            let outcome = read(&files, &folder, &mut random);
            assert_eq!(outcome.opened, u64::from(text == header), "{value} in {text}");
            total.add(&outcome);
            count += 1;
        }
    }
    println!("{count} files: {total}");
    assert!(count > 3000);
}
