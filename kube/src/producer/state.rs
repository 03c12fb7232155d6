//! The agent's state.

use wharf_feed::v1;

use super::table::Subject;

/// Condition of agents that report whether they have every row; absent in reports of older agents.
const ROWS_COMPLETE: &str = "RowsComplete";

/// A row that is not in force as sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    /// The agent's message.
    pub row: v1::RefusedRow,
    /// Object of a policy.
    pub subject: Option<Subject>,
}

/// State of the agent; the default is no stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AgentState {
    /// The stream's last report.
    pub report: Option<v1::Report>,
    /// Every row of the stream's first snapshot is in force.
    pub is_in_force: bool,
    /// Rows that are not in force.
    pub refused: Vec<Refused>,
}

impl AgentState {
    /// The agent has reported, and has every row: of this stream's first snapshot, or of an earlier stream. The rows of
    /// an earlier stream stay in force while a source of this process cannot be read.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.report.is_some() && (self.is_in_force || self.condition(ROWS_COMPLETE).is_ok())
    }

    /// Whether something differs for this node's object or its Events. Counts in the texts of problems do not matter:
    /// with them, each report would be a request to the API of every node.
    #[must_use]
    pub(super) fn differs(&self, other: &Self) -> bool {
        let fields = |report: &v1::Report| {
            let causes: Vec<String> = report.problems.iter().map(|problem| cause(problem).to_owned()).collect();
            v1::Report { problems: causes, ..report.clone() }
        };
        self.report.as_ref().map(fields) != other.report.as_ref().map(fields)
            || (self.is_in_force, &self.refused) != (other.is_in_force, &other.refused)
    }

    /// Whether a reported condition holds; an absent condition does not.
    ///
    /// # Errors
    /// It does not hold.
    pub fn condition(&self, name: &str) -> Result<(), String> {
        let conditions = self.report.iter().flat_map(|report| &report.conditions);
        match conditions.into_iter().find(|condition| condition.name == name) {
            Some(condition) if condition.holds => Ok(()),
            Some(condition) if !condition.message.is_empty() => Err(condition.message.clone()),
            Some(_) => Err(format!("the agent reports that {name} does not hold")),
            None => Err(format!("the agent does not report {name}")),
        }
    }
}

/// Cause of a problem: its text up to the colon. The rest has changing counts and times.
#[must_use]
pub fn cause(problem: &str) -> &str {
    problem.split(':').next().unwrap_or_default()
}
