//! The pinned Python packages, read from `requirements-mooncake.txt`.

use anyhow::{Context, Result, bail};

const REQUIREMENTS: &str = include_str!("../requirements-mooncake.txt");

/// One requirement: a package, its exact version and the hashes it may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    pub name: String,
    pub version: String,
    pub hashes: Vec<String>,
}

impl Pin {
    /// The pin of `name` in the project's requirements.
    pub fn find(name: &str) -> Result<Pin> {
        parse(REQUIREMENTS)?
            .into_iter()
            .find(|pin| pin.name == name)
            .with_context(|| format!("xtask/requirements-mooncake.txt does not pin {name}"))
    }

    /// The pin as one line of a pip requirements file.
    pub fn requirement(&self) -> String {
        let mut line = format!("{}=={}", self.name, self.version);
        for hash in &self.hashes {
            line.push_str(" --hash=");
            line.push_str(hash);
        }
        line
    }
}

fn parse(text: &str) -> Result<Vec<Pin>> {
    text.replace("\\\n", " ")
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(parse_requirement)
        .collect()
}

fn parse_requirement(line: &str) -> Result<Pin> {
    let mut words = line.split_whitespace();
    let package = words.next().unwrap_or_default();
    let (name, version) = package
        .split_once("==")
        .with_context(|| format!("`{package}` names no exact version: write `name==version`"))?;
    let hashes = words
        .map(|word| match word.strip_prefix("--hash=") {
            Some(hash) if hash.starts_with("sha256:") && hash.len() == "sha256:".len() + 64 => Ok(hash.to_owned()),
            _ => bail!("`{word}` of {package} is no `--hash=sha256:` with 64 hex digits"),
        })
        .collect::<Result<Vec<_>>>()?;
    if hashes.is_empty() {
        bail!("{package} has no hash: add `--hash=sha256:...`");
    }
    Ok(Pin { name: name.to_owned(), version: version.to_owned(), hashes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(digit: &str) -> String {
        format!("sha256:{}", digit.repeat(64))
    }

    #[test]
    fn reads_comments_continuations_and_several_hashes() {
        let text = format!(
            "# why\n\na-b==1.2.post1 \\\n  --hash={} \\\n  --hash={}\nc==3 --hash={}\n",
            hash("a"),
            hash("b"),
            hash("c")
        );
        let pins = parse(&text).unwrap();
        assert_eq!(pins.len(), 2);
        assert_eq!(pins[0].name, "a-b");
        assert_eq!(pins[0].version, "1.2.post1");
        assert_eq!(pins[0].hashes, [hash("a"), hash("b")]);
        assert_eq!(pins[1].hashes, [hash("c")]);
    }

    #[test]
    fn a_requirement_line_reads_back_as_itself() {
        let pin = Pin { name: "a".into(), version: "1".into(), hashes: vec![hash("0"), hash("f")] };
        assert_eq!(parse(&pin.requirement()).unwrap(), [pin]);
    }

    #[test]
    fn refuses_what_pip_could_not_check() {
        for (text, named) in [
            ("a>=1 --hash=sha256:00", "a>=1"),
            ("a==1", "a==1 has no hash"),
            ("a==1 --hash=sha256:00", "--hash=sha256:00"),
            ("a==1 --hash=md5:00", "--hash=md5:00"),
            ("a==1 --no-deps", "--no-deps"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(named), "{text:?} gave {error:?}");
        }
    }

    #[test]
    fn the_projects_pins_are_complete_and_agree_on_the_version() {
        let cpu = Pin::find("mooncake-transfer-engine-non-cuda").unwrap();
        let cuda = Pin::find("mooncake-transfer-engine").unwrap();
        assert_eq!(cpu.version, cuda.version);
        assert_eq!(cpu.hashes.len(), 2);
        assert_eq!(cuda.hashes.len(), 2);
        let error = Pin::find("no-such-package").unwrap_err().to_string();
        assert!(error.contains("no-such-package"), "{error}");
    }
}
