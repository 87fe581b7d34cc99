//! Tokens put around a text, as a post-processor of `tokenizers`.

use serde_json::{Map, Value, json};
use tokenizers::PostProcessorWrapper;

use super::super::error::Cause;

/// A post-processor that puts these ids around a text, and around each of a pair; none where there is nothing to put.
/// Built from its JSON form, because the library's own syntax for templates gives `$` and `:` in tokens a meaning.
pub(super) fn processor(
    inner: &tokenizers::Tokenizer,
    prefix: &[u32],
    suffix: &[u32],
) -> Result<Option<PostProcessorWrapper>, Cause> {
    if prefix.is_empty() && suffix.is_empty() {
        return Ok(None);
    }
    let mut special_tokens = Map::new();
    let mut named = |ids: &[u32]| -> Result<Vec<String>, Cause> {
        ids.iter()
            .map(|id| {
                let token = inner.id_to_token(*id).ok_or_else(|| format!("there is no token {id}"))?;
                special_tokens.insert(token.clone(), json!({"id": token, "ids": [id], "tokens": [token]}));
                Ok(token)
            })
            .collect()
    };
    let (prefix, suffix) = (named(prefix)?, named(suffix)?);
    let part = |sequence: &str, type_id: u32| -> Vec<Value> {
        let token = |token: &String| json!({"SpecialToken": {"id": token, "type_id": type_id}});
        let text = json!({"Sequence": {"id": sequence, "type_id": type_id}});
        prefix.iter().map(token).chain([text]).chain(suffix.iter().map(token)).collect()
    };
    let pair = [part("A", 0), part("B", 1)].concat();
    let processor = json!({
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": pair,
        "special_tokens": special_tokens,
    });
    Ok(Some(serde_json::from_value(processor)?))
}
