"""SQL view with one row per conversation, over the view ``experiences``.

``messages`` is the whole conversation of the run's last call, including the answer. ``thoughts`` are the model's
reasoning texts, ``{step, content}``, with steps counted from 1. ``tool_calls`` are ``{step, tool, args, result}``: the
result comes from the tool message that answers the call in a later prompt of the run, null if there is none.
``rewards`` are the judge's reward parts of the run's last step, ``total_reward`` its reward.

Of a call with several choices only one is included. Thoughts and tool calls are collected over all steps, so they are
complete even if an agent shortens its history.
"""

#: Requires the view ``experiences``.
CONVERSATIONS = """
CREATE VIEW conversations AS
WITH steps AS (
    SELECT *, from_json(messages, '["JSON"]') AS said FROM experiences
    QUALIFY row_number() OVER (PARTITION BY run_id, step ORDER BY row_id) = 1
),
lasts AS (
    SELECT * FROM steps QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY step DESC) = 1
),
thoughts AS (
    SELECT run_id, list({'step': step + 1, 'content': content} ORDER BY step) AS thoughts
    FROM (
        SELECT run_id, step, coalesce(response->>'reasoning_content', response->>'reasoning') AS content FROM steps
    )
    WHERE content <> ''
    GROUP BY run_id
),
results AS (
    SELECT run_id, id, arg_min(content, step) AS result
    FROM (
        SELECT run_id, step, message->>'tool_call_id' AS id, message->>'content' AS content
        FROM (SELECT run_id, step, unnest(said) AS message FROM steps)
        WHERE message->>'role' = 'tool'
    )
    GROUP BY run_id, id
),
calls AS (
    SELECT run_id, step, place, call->>'id' AS id, call->'function'->>'name' AS tool,
        call->'function'->>'arguments' AS args
    FROM (
        SELECT run_id, step, unnest(asked) AS call, generate_subscripts(asked, 1) AS place
        FROM (SELECT run_id, step, from_json(response->'tool_calls', '["JSON"]') AS asked FROM steps)
    )
),
tool_calls AS (
    SELECT c.run_id,
        list({'step': c.step + 1, 'tool': c.tool, 'args': c.args, 'result': r.result} ORDER BY c.step, c.place)
            AS tool_calls
    FROM calls c LEFT JOIN results r ON r.run_id = c.run_id AND r.id = c.id
    GROUP BY c.run_id
)
SELECT l.run_id AS conversation_id, l.round, l.task_id, l.group_id,
    to_json(list_append(l.said, l.response::JSON)) AS messages,
    coalesce(t.thoughts, []) AS thoughts,
    coalesce(c.tool_calls, []) AS tool_calls,
    l.reward_parts AS rewards,
    l.reward AS total_reward
FROM lasts l LEFT JOIN thoughts t ON t.run_id = l.run_id LEFT JOIN tool_calls c ON c.run_id = l.run_id
"""
