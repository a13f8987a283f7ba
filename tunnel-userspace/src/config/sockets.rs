use serde::{Deserialize, Serialize};

/// What becomes of connected sockets whose backend serves its Service no more.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sockets {
    /// Of which protocols they are ended; empty for none.
    pub end: Vec<Transport>,
    /// Whether those in pods are ended, too.
    pub pods: bool,
}

impl Default for Sockets {
    fn default() -> Self {
        Self {
            end: vec![Transport::Udp],
            pods: true,
        }
    }
}

impl Sockets {
    /// The protocols, as they are written.
    #[must_use]
    pub fn named(&self) -> Vec<String> {
        let word = |transport: &Transport| match transport {
            Transport::Udp => "udp".to_owned(),
            Transport::Tcp => "tcp".to_owned(),
        };
        self.end.iter().map(word).collect()
    }

    pub(super) fn check(&self) -> Result<(), (String, String)> {
        for (index, transport) in self.end.iter().enumerate() {
            let earlier = self.end.get(..index).unwrap_or_default();
            if earlier.contains(transport) {
                let field = format!("sockets.end[{index}]");
                return Err((field, "is there already".to_owned()));
            }
        }
        Ok(())
    }
}

/// A protocol whose sockets can be ended.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// A client that waits for an answer over UDP hears of the end at once, and asks another backend.
    Udp,
    /// A connection that goes on with a backend which left its Service, but lives, is cut off.
    Tcp,
}
