//! Checks that documents link to existing files, and that the book lists all pages.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

const SKIPPED: &[&str] = &["target", ".git", "node_modules"];

const SUMMARY: &str = "docs/SUMMARY.md";

pub(crate) fn check(root: &Path) -> Result<usize> {
    let mut documents = Vec::new();
    collect(root, &mut documents)?;
    let mut followed = 0;
    let mut broken = Vec::new();
    for document in &documents {
        let text = fs::read_to_string(document).with_context(|| format!("read {}", document.display()))?;
        let folder = document.parent().unwrap_or(root);
        for link in links(&text) {
            followed += 1;
            if !folder.join(&link).exists() {
                let document = document.strip_prefix(root).unwrap_or(document);
                broken.push(format!("{} -> {link}", document.display()));
            }
        }
    }
    if !broken.is_empty() {
        bail!("links to files that are not there: {}", broken.join("; "));
    }
    let summary = fs::read_to_string(root.join(SUMMARY)).unwrap_or_default();
    let listed = links(&summary);
    let is_missing = |page: &&str| *page != "SUMMARY.md" && !listed.iter().any(|link| link == page);
    let pages = documents.iter().filter_map(|document| document.strip_prefix(root).ok()?.strip_prefix("docs").ok());
    let missing: Vec<&str> = pages.filter_map(|page| page.to_str()).filter(is_missing).collect();
    if !missing.is_empty() {
        bail!("pages that {SUMMARY} does not list: {}", missing.join(", "));
    }
    Ok(followed)
}

fn collect(folder: &Path, documents: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let entry = entry.with_context(|| format!("list {}", folder.display()))?;
        let kind = entry.file_type().with_context(|| format!("look at {}", entry.path().display()))?;
        let name = entry.file_name();
        if kind.is_dir() && !SKIPPED.iter().any(|skipped| name == *skipped) {
            collect(&entry.path(), documents)?;
        } else if kind.is_file() && entry.path().extension().is_some_and(|extension| extension == "md") {
            documents.push(entry.path());
        }
    }
    Ok(())
}

/// Local targets of `[text](target)` outside code, without anchors.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        if fenced {
            continue;
        }
        // Prose and code alternate.
        for prose in line.split('`').step_by(2) {
            for piece in prose.split("](").skip(1) {
                let target = piece.split([')', ' ', '#']).next().unwrap_or_default();
                if !target.is_empty() && !target.contains(':') {
                    found.push(target.to_owned());
                }
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_where_they_are_links() {
        let text = "See [a](docs/a.md#part) and [b](b.md \"title\"), [c](https://c.example/x), [d](#here), `[e](e.md)`.\n\
                    ```\n[f](f.md)\n```\n![g](g.svg)";
        assert_eq!(links(text), ["docs/a.md", "b.md", "g.svg"]);
    }

    #[test]
    fn broken_links_and_unlisted_pages_are_named() -> Result<()> {
        let root = tempfile::tempdir()?;
        fs::create_dir_all(root.path().join("docs"))?;
        fs::write(root.path().join("docs/a.md"), "[up](../README.md)")?;
        fs::write(root.path().join("README.md"), "[a](docs/a.md)")?;
        let message = check(root.path()).map_err(|error| error.to_string());
        assert_eq!(message, Err("pages that docs/SUMMARY.md does not list: a.md".to_owned()));
        fs::write(root.path().join(SUMMARY), "[A](a.md)")?;
        assert_eq!(check(root.path())?, 3);
        fs::write(root.path().join("README.md"), "[a](docs/b.md)")?;
        let message = check(root.path()).map_err(|error| error.to_string());
        assert_eq!(message, Err("links to files that are not there: README.md -> docs/b.md".to_owned()));
        Ok(())
    }
}
