//! The first message of a TLS handshake, by hand: no more of TLS is looked at.

/// A ClientHello (RFC 8446, section 4.1.2) that asks for a name, or for none, in one record.
pub fn client_hello(server_name: Option<&str>) -> Vec<u8> {
    let mut extensions = Vec::new();
    if let Some(name) = server_name {
        // server_name (RFC 6066, section 3): a list with one host name.
        let entry = [&[0][..], &sized(2, name.as_bytes())].concat();
        extensions.extend([&[0, 0][..], &sized(2, &sized(2, &entry))].concat());
    }
    // supported_versions: TLS 1.3.
    extensions.extend([0, 43, 0, 3, 2, 3, 4]);
    let body =
        [&[3, 3][..], &[7; 32], &sized(1, &[]), &sized(2, &[0x13, 0x01]), &sized(1, &[0]), &sized(2, &extensions)]
            .concat();
    let handshake = [&[1][..], &sized(3, &body)].concat();
    [&[22, 3, 1][..], &sized(2, &handshake)].concat()
}

/// Bytes after their number, which takes so many bytes.
fn sized(width: usize, bytes: &[u8]) -> Vec<u8> {
    let length = bytes.len().to_be_bytes();
    [&length[length.len() - width..], bytes].concat()
}
