//! Items of `toFQDNs`, and of `dns` in `rules`, of cilium.io/v2.

use super::field::{Field, Read, Reader, quoted};
use crate::names::{Malformed, NamePattern};

pub(super) fn read(reader: &mut Reader, field: &Field<'_>) -> Read<NamePattern> {
    let object = reader.object(field, &["matchName", "matchPattern"], &[])?;
    match (object.get("matchName"), object.get("matchPattern")) {
        (Some(field), None) => parsed(reader, &field, NamePattern::name),
        (None, Some(field)) => parsed(reader, &field, NamePattern::pattern),
        (Some(_), Some(_)) => {
            Err(reader.refuse(object.field(), "has matchName and matchPattern", "write an item for each of them"))
        }
        (None, None) => {
            let remedy = "write matchName and a name, or matchPattern and a pattern";
            Err(reader.refuse_empty(&object, "has no matchName and no matchPattern", remedy))
        }
    }
}

fn parsed(
    reader: &mut Reader,
    field: &Field<'_>,
    parse: fn(&str) -> Result<NamePattern, Malformed>,
) -> Read<NamePattern> {
    let text = reader.text(field)?;
    parse(text).map_err(|malformed| {
        reader.refuse(field, format!("is {}, which {malformed}", quoted(text)), malformed.remedy())
    })
}
