// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/port"
)

// Bounds of an object. The API server refuses objects of more than 1.5 MiB.
const (
	maxPorts = 20_000    // in the list: 10,000 in both families
	maxBytes = 512 << 10 // of the list, compressed
	maxWide  = 20        // structured entries
	maxName  = 256       // bytes of an owner's name
	// For readers: what one object may cost them.
	maxPlain   = 16 << 20 // bytes of the list
	maxEntry   = 16 << 10 // bytes of one port
	maxSources = 16       // of one port
)

// Port is one entry of the list.
type Port struct {
	port.Key

	State port.State `json:"state"`
	// Withheld reports that the port is no server that others can reach, such as a bound
	// socket that does not listen; see Withheld.
	Withheld bool      `json:"withheld,omitempty"`
	Owner    Owner     `json:"owner"`
	Sources  []string  `json:"sources,omitempty"`
	Since    time.Time `json:"since"`
}

// Owner is who serves a port.
type Owner struct {
	Kind      port.OwnerKind `json:"kind"`
	Name      string         `json:"name,omitempty"`
	Namespace string         `json:"namespace,omitempty"`
	ID        string         `json:"id,omitempty"` // a pid, or the beginning of a container's id
}

// maxID is the length to which ids of containers are truncated: the whole does not compress.
const maxID = 12

// OwnerOf is what the list has of an owner.
func OwnerOf(o port.Owner) Owner {
	out := Owner{Kind: o.Kind, Name: truncate(o.Name, maxName), Namespace: truncate(o.Namespace, maxName)}
	switch o.Kind {
	case port.OwnerProcess, port.OwnerContainer:
		out.ID = truncate(o.ID, maxID)
	}
	return out
}

// String returns for example "container default/web", or "" if nobody is known.
func (o Owner) String() string {
	name := cmp.Or(o.Name, o.ID)
	switch {
	case o.Kind == port.OwnerUnknown:
		return ""
	case o.Namespace != "":
		name = o.Namespace + "/" + name
	}
	return o.Kind.String() + " " + name
}

// Withheld reports whether none of a port's origins is a server that others can reach. What
// is not published for another reason counts as reachable: a rule that is limited to some
// sources is open to these, and a socket that this machine itself cannot reach may be open
// to others.
func Withheld(origins []port.OriginInfo) bool {
	return !slices.ContainsFunc(origins, func(o port.OriginInfo) bool { return o.Withheld.Reach() > port.Nobody })
}

// truncate returns s with at most n bytes, as valid UTF-8.
func truncate(s string, n int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// Wide reports whether others than this machine's own programs may reach the port.
func (p Port) Wide() bool { return !p.Address.IsLoopback() && !p.Withheld }

// Report is what an agent knows.
type Report struct {
	Agent      string // its version
	Ports      []Port // in any order
	Conditions []Condition
	Starting   bool // some source has not listed its ports even once
}

// Condition is something that is true or not, and why it is not.
type Condition struct {
	Type    string // ConditionReady, ConditionHealthy
	True    bool
	Reason  string // one word
	Message string
}

// maxMessage is the length to which messages of conditions are truncated, in bytes.
const maxMessage = 1 << 10

func conditions(list []Condition) (out []metav1.Condition) {
	for _, c := range list {
		m := metav1.Condition{Type: c.Type, Status: metav1.ConditionFalse, Reason: c.Reason, Message: truncate(c.Message, maxMessage)}
		if c.True {
			m.Status = metav1.ConditionTrue
		}
		out = append(out, m)
	}
	return out
}

// build makes the content of an object, with a list of at most limit bytes: without times
// and holder.
func build(r Report, limit int) (Status, error) {
	s := Status{Agent: r.Agent, Ports: count(r.Ports), Conditions: conditions(r.Conditions)}
	slices.SortFunc(r.Ports, func(a, b Port) int { return a.Compare(b.Key) })
	for _, p := range r.Ports {
		switch {
		case !p.Wide():
		case len(s.Wide) == maxWide:
			s.WideOmitted++
		default:
			s.Wide = append(s.Wide, WidePort{Protocol: p.Protocol.String(), Address: p.Address.String(), Port: int(p.Port), Owner: p.Owner.String()})
		}
	}
	listed := slices.Clone(r.Ports)
	var plain []byte
	for n := min(len(listed), maxPorts); ; n /= 2 {
		listed = first(listed, n)
		var err error
		if plain, err = json.Marshal(listed); err != nil {
			return s, err
		}
		if s.List, err = compress(plain); err != nil {
			return s, err
		}
		if len(s.List) <= limit || n == 0 {
			break
		}
	}
	s.ListOmitted = s.Ports.Total - count(listed).Total
	var err error
	s.Hash, err = hash(s, plain)
	return s, err
}

// first returns n of the ports, the wide ones before others, in the order of their keys.
func first(list []Port, n int) []Port {
	if len(list) <= n {
		return list
	}
	slices.SortStableFunc(list, func(a, b Port) int {
		switch {
		case a.Wide() == b.Wide():
			return 0
		case a.Wide():
			return -1
		}
		return 1
	})
	list = list[:n]
	slices.SortFunc(list, func(a, b Port) int { return a.Compare(b.Key) })
	return list
}

// count counts ports: both families of one owner are one.
func count(rows []Port) (c Counts) {
	at := make(map[port.Key]*Port, len(rows))
	for i := range rows {
		at[rows[i].Key] = &rows[i]
	}
	by := map[port.State]*int{
		port.Active: &c.Active, port.Pending: &c.Pending, port.Conflict: &c.Conflict, port.Failed: &c.Failed, port.Denied: &c.Denied,
	}
	for _, p := range rows {
		state, wide := p.State, p.Wide()
		k, ok := p.OtherFamily()
		if q := at[k]; ok && q != nil && q.Owner == p.Owner {
			if p.Address.Is6() {
				continue // its port was counted
			}
			state, wide = max(state, q.State), wide || q.Wide()
		}
		c.Total++
		if n := by[state]; n != nil {
			*n++
		}
		if wide {
			c.Wide++
		}
	}
	return c
}

// hash is of all that readers see but times.
func hash(s Status, plain []byte) (string, error) {
	s.List = nil
	s.Conditions = slices.Clone(s.Conditions)
	for i := range s.Conditions {
		s.Conditions[i].LastTransitionTime = metav1.Time{}
	}
	b, err := json.Marshal(s)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	_, _ = sum.Write(b)
	_, _ = sum.Write(plain)
	return hex.EncodeToString(sum.Sum(nil)[:16]), nil
}

func compress(plain []byte) ([]byte, error) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write(plain); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// Decode returns the whole list of an object. It refuses one that is larger than any
// agent writes, without reading all of it: a few compressed bytes can be many ports.
func (s Status) Decode() ([]Port, error) {
	if len(s.List) == 0 {
		return nil, nil
	}
	z, err := gzip.NewReader(bytes.NewReader(s.List))
	if err != nil {
		return nil, fmt.Errorf("list: %w", err)
	}
	plain := &io.LimitedReader{R: z, N: maxPlain + 1}
	ports, err := decode(json.NewDecoder(whole{plain}))
	if plain.N == 0 {
		err = fmt.Errorf("more than %d bytes", maxPlain)
	}
	if err != nil {
		return nil, fmt.Errorf("list: %w", err)
	}
	return ports, nil
}

// whole reads as much as there is room for. json.Decoder looks at all white space again after
// each read, so that short ones make its work quadratic.
type whole struct{ io.Reader }

// Read implements io.Reader.
func (w whole) Read(p []byte) (int, error) {
	n, err := io.ReadFull(w.Reader, p)
	if errors.Is(err, io.ErrUnexpectedEOF) && n > 0 {
		err = nil // the next read has the reader's own error
	}
	return n, err
}

// decode reads an array of ports, or null, and nothing after it.
func decode(d *json.Decoder) (ports []Port, err error) {
	begin, err := d.Token()
	switch {
	case err != nil:
		return nil, err
	case begin == json.Delim('['):
		for d.More() {
			if len(ports) == maxPorts {
				return nil, fmt.Errorf("more than %d ports", maxPorts)
			}
			p, err := decodePort(d)
			if err != nil {
				return nil, fmt.Errorf("entry %d: %w", len(ports), err)
			}
			ports = append(ports, p)
		}
		if _, err := d.Token(); err != nil {
			return nil, err
		}
	case begin != nil:
		return nil, fmt.Errorf("want an array, got %v", begin)
	}
	switch _, err := d.Token(); {
	case errors.Is(err, io.EOF):
		return ports, nil
	case err != nil:
		return nil, err
	}
	return nil, errors.New("more than one array")
}

func decodePort(d *json.Decoder) (p Port, err error) {
	var raw json.RawMessage
	if err := d.Decode(&raw); err != nil {
		return p, err
	}
	if len(raw) > maxEntry {
		return p, fmt.Errorf("more than %d bytes", maxEntry)
	}
	if err := json.Unmarshal(raw, &p); err != nil {
		return p, err
	}
	switch {
	case p.Address == (netip.Addr{}):
		return p, errors.New("no address")
	case len(p.Sources) > maxSources:
		return p, fmt.Errorf("more than %d sources", maxSources)
	}
	return p, nil
}
