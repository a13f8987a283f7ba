//! The table of rules that a request for a certificate must meet (no I/O).

use std::collections::BTreeMap;

use rcgen::SubjectPublicKeyInfo;

use crate::{
    events::truncate,
    identity::{
        GATEWAY_NAME, Role, check_node_name,
        request::{CertificateRequest, MIN_EXPIRATION},
    },
};

/// The maximum length of a sentence, in bytes.
const MAX_MESSAGE: usize = 800;

/// The keys in `spec.extra` under which the API server names the Node of a pod whose token was used (Kubernetes
/// `staging/src/k8s.io/apiserver/pkg/authentication/serviceaccount/util.go`).
pub(super) const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const NODE_UID: &str = "authentication.kubernetes.io/node-uid";

/// The prefix of a kubelet's user name, and its group.
const KUBELET_USER: &str = "system:node:";
const KUBELET_GROUP: &str = "system:nodes";

/// The fields of a CertificateSigningRequest that the rules compare.
#[derive(Clone, Debug)]
pub struct Asked<'a> {
    /// The role for which the certificate is, by the signer.
    pub role: Role,
    /// The request, as PEM.
    pub request: &'a [u8],
    /// The usages of the key.
    pub usages: &'a [String],
    /// The name of the user who made the request.
    pub user: &'a str,
    /// The user's groups.
    pub groups: &'a [String],
    /// Further facts about the user.
    pub extra: &'a BTreeMap<String, Vec<String>>,
    /// The wanted life of the certificate, in seconds.
    pub expiration_seconds: Option<i64>,
}

/// The facts about a Node that the rules compare.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NodeFacts {
    /// The uid.
    pub uid: String,
    /// True if the Node is being deleted.
    pub is_being_deleted: bool,
}

/// The settings for the rules.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The user names of the ServiceAccounts whose pods may ask: those of agents, and those of gateways.
    pub agents: String,
    /// As above, for gateways.
    pub gateways: String,
    /// The maximum life of a certificate, in seconds.
    pub max_life: i64,
}

/// A request that meets all rules that need no Node.
#[derive(Debug)]
pub struct Candidate {
    /// The name of the Node.
    pub node: String,
    /// The public key.
    pub public_key: SubjectPublicKeyInfo,
    /// The uid of the Node by the requester's token, or `None` for a kubelet.
    node_uid: Option<String>,
    /// The wanted life of the certificate, in seconds.
    pub life: i64,
    expiration_seconds: Option<i64>,
}

/// The reason for which a request is denied: one for each row of the table, in the order in which they are checked.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Denial {
    /// The form, the key or the signature.
    Form,
    /// The usages.
    Usages,
    /// The subject.
    Subject,
    /// The alternative names.
    AlternativeNames,
    /// The extensions.
    Extensions,
    /// The requester.
    Requester,
    /// The Node.
    Node,
    /// The deny list.
    Listed,
    /// The life.
    Life,
}

impl Denial {
    /// All reasons.
    pub const ALL: [Self; 9] = [
        Self::Form,
        Self::Usages,
        Self::Subject,
        Self::AlternativeNames,
        Self::Extensions,
        Self::Requester,
        Self::Node,
        Self::Listed,
        Self::Life,
    ];

    /// Returns the reason in the condition of the request and in the Event.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Form => "MalformedRequest",
            Self::Usages => "WrongUsages",
            Self::Subject => "WrongSubject",
            Self::AlternativeNames => "WrongAlternativeNames",
            Self::Extensions => "UnexpectedExtension",
            Self::Requester => "WrongRequester",
            Self::Node => "WrongNode",
            Self::Listed => "DeniedNode",
            Self::Life => "WrongExpirationSeconds",
        }
    }

    /// Returns the label in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Form => "form",
            Self::Usages => "usages",
            Self::Subject => "subject",
            Self::AlternativeNames => "alternative_names",
            Self::Extensions => "extensions",
            Self::Requester => "requester",
            Self::Node => "node",
            Self::Listed => "denied_node",
            Self::Life => "expiration_seconds",
        }
    }
}

/// A request that is denied: the reason, and a sentence.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Denied {
    /// The reason.
    pub denial: Denial,
    /// The sentence.
    pub message: String,
    /// The Node of the requester, if its credentials name one. Otherwise the name that the request asks for, if it is a valid
    /// name.
    pub node: Option<String>,
}

type Checked<T> = Result<T, (Denial, String)>;

impl Rules {
    /// Checks everything but the Node.
    ///
    /// # Errors
    ///
    /// Returns the first rule that the request doesn't meet.
    pub fn check(&self, asked: &Asked<'_>) -> Result<Candidate, Denied> {
        let mut named = None;
        self.check_rows(asked, &mut named)
            .map_err(|(denial, message)| Denied {
                denial,
                // Names in requests may be long, and longer when they are escaped.
                message: truncate(&message, MAX_MESSAGE).to_owned(),
                node: requesting_node(asked).map(str::to_owned).or(named),
            })
    }

    /// Stores the name that the request asks for in `named`, if it is a valid one.
    fn check_rows(&self, asked: &Asked<'_>, named: &mut Option<String>) -> Checked<Candidate> {
        let role = asked.role;
        let request = CertificateRequest::read(asked.request)
            .map_err(|how| (Denial::Form, format!("the request can't be used: {how}")))?;
        check_usages(role, asked.usages)?;
        let node = check_subject(role, &request)?.to_owned();
        *named = Some(node.clone());
        check_names(role, &request)?;
        if let Some(extra) = &request.extra {
            let message = format!("the request asks for {extra}; nothing of that kind is issued");
            return Err((Denial::Extensions, message));
        }
        let node_uid = self.check_requester(asked, &node)?;
        Ok(Candidate {
            node,
            public_key: request.public_key,
            node_uid,
            life: asked.expiration_seconds.unwrap_or(self.max_life),
            expiration_seconds: asked.expiration_seconds,
        })
    }

    /// Checks that the request was made by a pod of the role on the Node, or by the Node's kubelet (for agents). Returns the uid
    /// of the Node, if the requester's token contains one.
    fn check_requester(&self, asked: &Asked<'_>, node: &str) -> Checked<Option<String>> {
        let refuse = |message: String| Err((Denial::Requester, message));
        let (user, account) = match asked.role {
            Role::Agent => (asked.user, &self.agents),
            Role::Gateway => (asked.user, &self.gateways),
        };
        let user_shown = user.escape_debug();
        if user == account {
            let (Some(name), Some(uid)) = (one(asked.extra, NODE_NAME), one(asked.extra, NODE_UID))
            else {
                return refuse(format!(
                    "{user_shown} made the request with a token that is not bound to a Node"
                ));
            };
            if name != node {
                return refuse(format!(
                    "a pod on Node {} made the request, but it is for Node {node}",
                    name.escape_debug()
                ));
            }
            return Ok(Some(uid.to_owned()));
        }
        let kubelet = user.strip_prefix(KUBELET_USER);
        if let (Role::Agent, Some(name)) = (asked.role, kubelet)
            && asked.groups.iter().any(|group| group == KUBELET_GROUP)
        {
            if name == node {
                return Ok(None);
            }
            return refuse(format!(
                "the kubelet of Node {} made the request, but it is for Node {node}",
                name.escape_debug()
            ));
        }
        refuse(format!(
            "{user_shown} made the request; only {account}{} may ask for the certificate of {}",
            if asked.role == Role::Agent {
                " and the Node's kubelet"
            } else {
                ""
            },
            asked.role.with_article()
        ))
    }

    /// Checks the Node of a request, whether its name is on the deny list, and the life.
    ///
    /// # Errors
    ///
    /// Returns the first rule that the request doesn't meet.
    pub fn check_node(
        &self,
        candidate: &Candidate,
        node: Option<&NodeFacts>,
        is_listed: bool,
    ) -> Result<(), Denied> {
        let name = &candidate.node;
        let deny = |denial, message| {
            Err(Denied {
                denial,
                message,
                node: Some(name.clone()),
            })
        };
        let Some(node) = node else {
            return deny(Denial::Node, format!("there is no Node {name}"));
        };
        if let Some(uid) = &candidate.node_uid
            && *uid != node.uid
        {
            let message =
                format!("Node {name} has been created again since the requester's pod was started");
            return deny(Denial::Node, message);
        }
        if node.is_being_deleted {
            return deny(Denial::Node, format!("Node {name} is being deleted"));
        }
        if is_listed {
            return deny(Denial::Listed, format!("Node {name} is on the deny list"));
        }
        if let Some(seconds) = candidate.expiration_seconds
            && !(MIN_EXPIRATION..=self.max_life.max(MIN_EXPIRATION)).contains(&seconds)
        {
            let message = format!(
                "expirationSeconds is {seconds}; it must be absent, or from {MIN_EXPIRATION} to {}",
                self.max_life.max(MIN_EXPIRATION)
            );
            return deny(Denial::Life, message);
        }
        Ok(())
    }
}

/// Returns the name of the Node that the requester's credentials contain, if it is a valid one.
fn requesting_node<'a>(asked: &Asked<'a>) -> Option<&'a str> {
    let kubelet = asked.user.strip_prefix(KUBELET_USER);
    let name = one(asked.extra, NODE_NAME).or(kubelet)?;
    check_node_name(name).is_ok().then_some(name)
}

/// Returns the value of a fact about a user that has exactly one.
fn one<'a>(extra: &'a BTreeMap<String, Vec<String>>, key: &str) -> Option<&'a str> {
    match extra.get(key).map(Vec::as_slice) {
        Some([value]) => Some(value),
        _ => None,
    }
}

fn check_usages(role: Role, usages: &[String]) -> Checked<()> {
    let mut wanted = role.usages();
    wanted.sort_unstable();
    let mut found: Vec<&str> = usages.iter().map(String::as_str).collect();
    found.sort_unstable();
    if found == wanted {
        return Ok(());
    }
    let message = format!(
        "the usages are {}; those of {} are exactly {}",
        found.join(", ").escape_debug(),
        role.with_article(),
        wanted.join(", ")
    );
    Err((Denial::Usages, message))
}

/// Returns the common name, which is that of the Node.
fn check_subject(role: Role, request: &CertificateRequest) -> Checked<&str> {
    let organization = role.organization();
    let ([found], [node], 2) = (
        &*request.organizations,
        &*request.common_names,
        request.subject_attributes,
    ) else {
        let message = format!(
            "the subject is {}; expected exactly O={organization} and one CN, the name of the Node",
            request.subject
        );
        return Err((Denial::Subject, message));
    };
    if found != organization {
        let message = format!(
            "the subject is {}; the organisation must be {organization}",
            request.subject
        );
        return Err((Denial::Subject, message));
    }
    check_node_name(node).map_err(|error| (Denial::Subject, error.to_string()))?;
    Ok(node)
}

fn check_names(role: Role, request: &CertificateRequest) -> Checked<()> {
    let refuse = |message: String| Err((Denial::AlternativeNames, message));
    if let Some(other) = &request.other_name {
        return refuse(format!("the request asks for the name {other}"));
    }
    let names = &*request.dns_names;
    match (role, names) {
        (Role::Agent, []) => Ok(()),
        (Role::Gateway, [name]) if name == GATEWAY_NAME => Ok(()),
        (Role::Agent, _) => refuse(format!(
            "the request asks for the names {}; an agent's certificate has none",
            names.join(", ").escape_debug()
        )),
        (Role::Gateway, _) => refuse(format!(
            "the request asks for the names {}; a gateway's certificate has exactly {}",
            names.join(", ").escape_debug(),
            GATEWAY_NAME
        )),
    }
}

#[cfg(test)]
mod tests;
