// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// api is an API server in memory, as far as this package asks.
type api struct {
	mu      sync.Mutex
	version int
	conf    *rest.Config
	objects map[string]*NodeInventory
	nodes   map[string]*node
	watches []*io.PipeWriter
	asked   []string // "get nodes", "update nodeinventories"

	away   error          // of each request
	refuse map[string]int // HTTP status by what is asked
	served []string       // versions of the group; nil if there is no CRD
	limit  int            // bytes of a body, 0 for none
	drops  bool           // it does not know some fields
}

func newAPI(nodes ...string) *api {
	a := &api{objects: make(map[string]*NodeInventory), nodes: make(map[string]*node), refuse: make(map[string]int), served: []string{Version}}
	a.conf = &rest.Config{Host: "http://api", Transport: a}
	for _, n := range nodes {
		a.addNode(n, "boot-"+n)
	}
	return a
}

func (a *api) addNode(name, boot string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	n := &node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(fmt.Sprintf("uid-%d", a.version)), Labels: map[string]string{"name": name}}}
	n.Status.NodeInfo.BootID = boot
	n.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}
	a.nodes[name] = n
}

// removeNode removes a node and what it owns.
func (a *api) removeNode(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.nodes, name)
	if o := a.objects[name]; o != nil {
		delete(a.objects, name)
		a.event("DELETED", o)
	}
}

// set changes the server, as f does.
func (a *api) set(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

func (a *api) config() (*rest.Config, string, error) { return a.conf, "the test", nil }

func (a *api) object(name string) *NodeInventory {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.objects[name]
}

// count returns how often something was asked.
func (a *api) count(what string) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.asked {
		if strings.HasPrefix(s, what) {
			n++
		}
	}
	return n
}

func (a *api) writes() int { return a.count("create") + a.count("update") }

// RoundTrip implements http.RoundTripper.
func (a *api) RoundTrip(r *http.Request) (*http.Response, error) {
	var body []byte
	if r.Body != nil {
		body, _ = io.ReadAll(r.Body)
		_ = r.Body.Close()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	if slices.Equal(parts, []string{"apis", Group}) {
		return a.group(), nil
	}
	resource, name := parts[2], ""
	if parts[0] == "apis" {
		resource = parts[3]
	}
	if last := parts[len(parts)-1]; last != resource {
		name = last
	}
	verb := map[string]string{http.MethodGet: "get", http.MethodPost: "create", http.MethodPut: "update"}[r.Method]
	if verb == "get" && name == "" {
		verb = "list"
		if r.URL.Query().Get("watch") != "" {
			verb = "watch"
		}
	}
	asked := verb + " " + resource
	a.asked = append(a.asked, asked)
	switch {
	case a.away != nil:
		return nil, a.away
	case a.refuse[asked] != 0:
		return refusal(a.refuse[asked], "cannot "+verb), nil
	case resource == "nodes":
		return a.node(name), nil
	case !slices.Contains(a.served, Version):
		return refusal(http.StatusNotFound, "the server could not find the requested resource"), nil
	}
	only := strings.TrimPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
	switch verb {
	case "list":
		return a.list(only), nil
	case "watch":
		return a.watch(), nil
	case "get":
		if o := a.objects[name]; o != nil {
			return answer(o), nil
		}
		return refusal(http.StatusNotFound, "not found"), nil
	}
	return a.write(verb, name, body), nil
}

func (a *api) group() *http.Response {
	if len(a.served) == 0 {
		return refusal(http.StatusNotFound, "not found")
	}
	g := metav1.APIGroup{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroup"}, Name: Group}
	for _, v := range a.served {
		g.Versions = append(g.Versions, metav1.GroupVersionForDiscovery{GroupVersion: Group + "/" + v, Version: v})
	}
	return answer(g)
}

func (a *api) node(name string) *http.Response {
	if name == "" {
		l := nodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}}
		for _, n := range a.nodes {
			l.Items = append(l.Items, *n)
		}
		return answer(l)
	}
	if n := a.nodes[name]; n != nil {
		return answer(n)
	}
	return refusal(http.StatusNotFound, "node not found")
}

func (a *api) list(only string) *http.Response {
	l := NodeInventoryList{TypeMeta: metav1.TypeMeta{APIVersion: Group + "/" + Version, Kind: Kind + "List"}}
	l.ResourceVersion = strconv.Itoa(a.version)
	for _, o := range a.objects {
		if only == "" || o.Name == only {
			l.Items = append(l.Items, *o)
		}
	}
	return answer(l)
}

func (a *api) watch() *http.Response {
	r, w := io.Pipe()
	a.watches = append(a.watches, w)
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: r}
}

// endWatches closes all watches.
func (a *api) endWatches() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.watches {
		_ = w.Close()
	}
	a.watches = nil
}

func (a *api) event(kind string, o *NodeInventory) {
	b, _ := json.Marshal(map[string]any{"type": kind, "object": o})
	for _, w := range a.watches {
		_, _ = w.Write(append(b, '\n'))
	}
}

func (a *api) write(verb, name string, body []byte) *http.Response {
	o := new(NodeInventory)
	if err := json.Unmarshal(body, o); err != nil {
		return refusal(http.StatusBadRequest, err.Error())
	}
	have := a.objects[o.Name]
	switch {
	case a.limit > 0 && len(body) > a.limit:
		return refusal(http.StatusRequestEntityTooLarge, "too large")
	case verb == "create" && have != nil:
		return refusal(http.StatusConflict, "exists")
	case verb == "update" && (have == nil || name != o.Name):
		return refusal(http.StatusNotFound, "not found")
	case verb == "update" && have.ResourceVersion != o.ResourceVersion:
		return refusal(http.StatusConflict, "changed")
	}
	a.put(o)
	return answer(a.objects[o.Name])
}

func (a *api) put(o *NodeInventory) {
	a.version++
	o.ResourceVersion = strconv.Itoa(a.version)
	if a.drops {
		o.Status.List = nil
	}
	kind := "MODIFIED"
	if a.objects[o.Name] == nil {
		kind = "ADDED"
	}
	a.objects[o.Name] = o
	a.event(kind, o)
}

func answer(v any) *http.Response { return response(http.StatusOK, v) }

func refusal(code int, message string) *http.Response {
	reasons := map[int]metav1.StatusReason{
		403: metav1.StatusReasonForbidden, 404: metav1.StatusReasonNotFound, 409: metav1.StatusReasonConflict, 413: metav1.StatusReasonRequestEntityTooLarge,
	}
	return response(code, metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Message: message, Reason: reasons[code], Code: int32(code),
	})
}

func response(code int, v any) *http.Response {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(b))}
}
